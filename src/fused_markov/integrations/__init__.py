"""Serving engines that can draft with this library."""
