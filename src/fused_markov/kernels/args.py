"""What the kernels are given: three named tuples that every phase takes alike."""

from typing import Any, NamedTuple


class Inputs(NamedTuple):
    """One decode step. R rows, S draft steps, V candidates, strides in elements."""

    w1: Any  # [w1_rows, rank] Markov embedding by target id
    w2: Any  # [w2_rows, rank] Markov bias, one row a candidate; int8 codes where FORMAT says so
    id_map: Any  # [V] int64 target id of each candidate (MAPPED)
    keys: Any  # [V] int32 `noise.token_keys` of the candidates' target ids, of the stream
    successors: Any  # [vocab_size, SUCCESSORS] int32 candidates that stand out after a token
    successor_biases: Any  # [vocab_size, SUCCESSORS] and their biases
    holes: Any  # [num_holes] int32 target ids below vocab_size that no candidate maps to
    base: Any  # [R, S, >=V] base logits
    anchors: Any  # [R] previous token of step 0
    positions: Any  # [R, S] positions of the sampled tokens
    slots: Any  # [R, S] request slots, negative: padding
    temperature: Any  # [N] by slot (NOISE)
    seeds: Any  # [N] int64 by slot (NOISE)
    cache: Any  # [N, >=S, width] logits to fill (CACHED)
    tokens: Any  # [R, S] drafted target ids, to fill
    nonfinite: Any  # [R, S] bool, contiguous, to fill
    base_row: Any
    base_step: Any
    anchor_row: Any
    position_row: Any
    position_step: Any
    slot_row: Any
    slot_step: Any
    temperature_slot: Any
    seed_slot: Any
    cache_slot: Any
    cache_step: Any
    token_row: Any
    token_step: Any
    rows: Any  # R
    vocab: Any  # V
    vocab_size: Any  # target vocabulary
    lowest_id: Any  # the token of a row with no candidate above -inf
    num_holes: Any
    num_fill: Any  # cache columns that get -inf: holes, then those past the vocabulary
    fill_from: Any  # first of the cache columns past the vocabulary
    scale: Any
    soft_cap: Any
    # Of a head with a variant (VARIANT): `w1` is then the scratch of z; see `kernels.variant`.
    table: Any  # [w1_rows, rank] W1
    context: Any  # [M, outs] fp32 the layer's part of the hidden states
    mix: Any  # [outs, rank or 2 * rank] the layer's weights for state and embedding
    bans: Any  # [N, W] or [N, S, W] int32 bitmasks of the target ids that may be drafted (BANNED)
    ban_slot: Any
    ban_step: Any
    top_k: Any  # [N] by slot (TOP_K)
    top_p: Any  # [N] by slot (TOP_P)
    min_p: Any  # [N] by slot (MIN_P)
    top_k_slot: Any
    top_p_slot: Any
    min_p_slot: Any
    cache_width: Any
    w2_scale: Any  # [row blocks, SCALE_PARTS] fp32 scales of a W2 in fewer bits
    w2_groups: Any  # [w2_rows, rank / 16] int8 codes of NVFP4's e4m3 scales
    w2_words: Any  # w2's codes as int32 (PER_WORD)


class Scratch(NamedTuple):
    """One sampler's working memory. M = R * S row-steps, m = r * S + s."""

    candidates: Any  # [M, C] int32 the guess's candidates
    link: Any  # [M, C] int32 best candidate of a row-step after each candidate of the step before
    link_need: Any  # [M, C] fp32 and its `row_need`
    link_sure: Any  # [M, C] fp32 and its `sure`
    links_left: Any  # [R] int32 link work items finished of a row, to find the last one
    guess: Any  # [M] int32 guessed token
    before: Any  # [M] int32 the token before each row-step, as guessed
    sure: Any  # [M] fp32 score from which the gated check's winner is the winner
    start: Any  # [R] int32 steps settled so far
    # What a check reads: a list of records of row-steps, in no particular order.
    place: Any  # [M] int32 where in the list a row-step stands
    num_active: Any  # [PASSES + 1] int32 its length, by pass
    row_prev: Any  # [M] int32 previous token that the check assumes
    row_guess: Any  # [M] int32 candidate that was guessed
    row_step: Any  # [M] int32 its row-step
    row_need: Any  # [M] fp32 score a token must be able to reach to matter
    row_temp: Any  # [M] fp32 temperature
    row_state: Any  # [M] int32 hash state (uint32 bits)
    row_state64: Any  # [M] int32 second hash state, for fp64 noise
    row_base: Any  # [M] int64 offset of its base logits
    row_cache: Any  # [M] int64 offset of its cached logits
    winner: Any  # [M] int64 best score and target id of a row-step, as `rows.packed`; 0: none
    # In its place with fp64 scores, which leave no room for an id:
    best: Any  # [parts, blocks * BLOCK_M] fp64 best score in each part of the vocabulary
    best_id: Any  # [parts, blocks * BLOCK_M] int32 their target ids
    parts: Any  # [1] int32 how many parts the last check had
    arrivals: Any  # [1] int64 grid barrier
    passes: Any  # [1] int64 result: passes over W2
    state: Any = None  # [M, rank] a variant's state after each row-step (VARIANT)
    row_ban: Any = None  # [M] int64 offset of its bans, for a record as above
    shaped: Any = None  # [M] fp32 or fp64 best score of a shaped row-step (SHAPED)
    shaped_id: Any = None  # [M] int32 its target id; -1: the row-step is not shaped


class StepScratch(NamedTuple):
    """The per-step engine's working memory, in two halves that steps use in turn."""

    best: Any  # [2 * programs, R] fp32 or fp64 best score in each program's part of the vocabulary
    best_id: Any  # [2 * programs, R] int32 their target ids
    state: Any = None  # [M, rank] a variant's state after each row-step (VARIANT)
    shaped: Any = None  # [R] fp32 or fp64 best score of the last step's shaped rows (SHAPED)
    shaped_id: Any = None  # [R] int32 its target id; -1: the row is not shaped


class HiddenInputs(NamedTuple):
    """What is made of hidden states; see `kernels.hidden`. M = R * S, strides in elements."""

    hidden: Any  # [R, S, width]
    hidden_weight: Any  # [outs, width] a variant's weights
    hidden_bias: Any  # [outs]
    context: Any  # [M, outs] fp32, to fill
    confidence_weight: Any  # [width] fp32, or [width + rank]
    confidence_bias: Any  # fp32
    confidence: Any  # [M] fp32, to fill
    limit: Any  # [N] by slot
    cut_slots: Any  # [M] int64, to fill
    lengths: Any  # [R] int64, to fill
    w1: Any
    anchors: Any
    slots: Any
    tokens: Any
    nonfinite: Any
    hidden_row: Any
    hidden_step: Any
    limit_slot: Any
    anchor_row: Any
    slot_row: Any
    slot_step: Any
    token_row: Any
    token_step: Any
    rows: Any  # R
    vocab_size: Any
    outs: Any
    width: Any  # H


class HiddenShape(NamedTuple):
    """What the compiler must know for `kernels.hidden`."""

    STEPS: int
    STEPS_P2: int
    RANK: int
    WITH_MARKOV: bool  # the confidence head reads W1's rows
    WEIGHT: Any  # dtype of w1 and a variant's weights


class Shape(NamedTuple):
    """Everything the compiler must know: the kind of problem and the tile sizes."""

    STEPS: int  # S
    STEPS_P2: int  # S, rounded up to a power of two
    RANK: int  # r
    NOISE: bool  # temperatures are given
    FP64: bool  # fp64 noise and scores
    CACHED: bool  # logits are kept
    MAPPED: bool  # reduced vocabulary: candidates have an id map
    TARGET_WIDE: bool  # the cache is indexed by target id
    FILL: bool  # some cache columns belong to no candidate
    SCALED: bool
    CAPPED: bool
    EVEN: bool  # V is a multiple of BLOCK_V
    PTX: bool  # NVIDIA's instructions are understood
    ALIGNED: bool  # V and the rows of base and cache are multiples of 8 elements
    WEIGHT: Any  # dtype of w1, and of w2 unless it is in fewer bits
    LOGIT: Any  # dtype of base + bias
    CACHE: Any  # dtype logits are kept in
    PASSES: int  # most passes a launch can need
    # a tile of logits
    BLOCK_M: int  # row-steps
    BLOCK_V: int  # candidates
    BLOCK_K: int  # part of the rank multiplied at a time
    STAGES: int  # tiles in flight
    DESCRIBED: bool = False  # W2's tiles are loaded through a tensor descriptor
    # guess
    CANDIDATES: int = 0  # C, a row-step
    CHUNKS: int = 0  # parts of the vocabulary, each guessed by one work item
    GUESS_M: int = 0  # row-steps a work item looks at side by side
    LANES: int = 0  # tokens a work item looks at side by side
    GUESS_APART: bool = False  # a check scores a row's guess before it looks for better tokens
    # link
    PREDECESSORS: int = 0  # candidates of the step before that a work item links
    SUCCESSORS: int = 0  # successors a token, or none are known
    LINK_K: int = 0  # part of the rank multiplied at a time
    LINK_STAGES: int = 0  # such parts in flight
    CHAIN_K: int = 0  # part of the rank that a chain's step multiplies at a time
    CHAIN_STAGES: int = 0  # such parts in flight
    CHAIN_AHEAD: bool = False  # in place of pieces: a step's rows of W2 are loaded a step ahead
    STREAM: str = "vllm-0.33"  # name of the noise stream
    TEMPERED: bool = False  # the cache holds logits divided by temperature
    # a head with a variant
    VARIANT: int = 0  # none, 1: gated, 2: rnn
    BANNED: bool = False  # bans are given
    TRANSFORM: Any = None  # the head's `LogitTransform.triton_fn`
    TRANSFORM_PARAMETERS: tuple[float, ...] = ()
    TRANSFORM_KEY: str = ""  # its code, for Triton's cache does not see it in here
    # draft distributions
    SHAPED: bool = False  # some rows may have a threshold, by
    TOP_K: bool = False
    TOP_P: bool = False
    MIN_P: bool = False
    CACHE_SHIFT: int = 0  # low bits of fp32 that the cache's dtype lacks
    # limited candidates
    LIMIT: int = 0  # candidates a row-step
    LIMIT_BLOCK: int = 0  # of those multiplied at a time
    BASE_SHIFT: int = 0  # low bits of fp32 that the base's dtype lacks
    # how W2 is stored
    FORMAT: str = "plain"  # or "fp8", "int8", "nvfp4"
    SCALE_ROWS: int = 1  # candidates that share a scale; 0: all
    SCALE_RANK: int = 0  # part of the rank that shares one
    SCALE_PARTS: int = 1  # such parts
    PER_WORD: int = 0  # values in 32 bits, where a check takes words apart; 0: it takes bytes
