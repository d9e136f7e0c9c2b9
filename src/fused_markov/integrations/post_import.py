"""Call a function when a module is imported, or at once where it already is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Run ``callback(module)`` right after module ``name`` has been executed.

    Nothing is imported for it, and looking for the module without importing it changes nothing.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(MetaPathFinder):
    """Finds one module through the other finders and wraps its loader; leaves once it has run."""

    def __init__(self, name: str, callback: Callback) -> None:
        self.name, self.callback = name, callback
        self.searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self.searching:
            return None
        self.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.executed)
        return spec

    def executed(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self.callback(module)


class _Loader(Loader):
    """A module's own loader, followed by the callback."""

    def __init__(self, inner: Loader, callback: Callback) -> None:
        self.inner, self.callback = inner, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module's own loader is what introspection (inspect, pickling, reload) should see.
        if module.__spec__ is not None:
            module.__spec__.loader = self.inner
        module.__loader__ = self.inner
        self.inner.exec_module(module)
        self.callback(module)
