"""Puts the parts of a session together: checks first, then weights, caches, the path of its steps, and a draft."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_config import DraftConfig
from stepkernel.model.shard import Shard
from stepkernel.program.inputs import Caches
from stepkernel.runtime.caches import allocate_caches
from stepkernel.runtime.device_engine import Device, DeviceEngine, open_device
from stepkernel.runtime.drafting import Draft, DrafterFactory
from stepkernel.runtime.engine import Engine, EngineOptions, Progress, pack, specialise
from stepkernel.runtime.rehearsal import Room
from stepkernel.runtime.sampling import RequestError
from stepkernel.runtime.speculation import SpeculationOptions, Speculator
from stepkernel.runtime.text import TextCodec

PAGE_TOKENS = 64
MOST_CONTEXT = 4096  # tokens of a request, where nobody asks for more


@dataclass(frozen=True)
class Parts:
    """What a session is made of."""

    config: ModelConfig
    engine: Engine | DeviceEngine
    caches: Caches
    codec: TextCodec
    max_context: int
    speculator: Speculator | None = None


@dataclass(frozen=True)
class RoomWanted:
    """Tokens of a request, tokens of a page, pages of all requests; None: by default (`Session.open`)."""

    max_context: int | None
    page_tokens: int | None
    cache_pages: int | None


@dataclass(frozen=True)
class Place:
    """Where steps run; on a device by the built kernels of a directory."""

    device: Device
    kernels: Path | None


@dataclass(frozen=True)
class Drafting:
    """A draft's directory, and how to use it."""

    directory: Path
    options: SpeculationOptions


def assemble(
    directory: Path,
    options: EngineOptions,
    wanted: RoomWanted,
    place: Place,
    drafting: Drafting | None,
    progress: Progress | None,
) -> Parts:
    """Raises RequestError, ConfigError or CheckpointError; what can be refused is, before weights are read."""
    checkpoint = Checkpoint.open(directory)
    config, drafts = checkpoint.config, options.drafts
    draft = None if drafting is None else drafting.directory
    context = default_context(config, draft, drafts) if wanted.max_context is None else wanted.max_context
    if not 2 <= context <= config.max_positions:
        raise RequestError(f"max_context {context}: the model takes 2 to {config.max_positions} tokens")
    if wanted.page_tokens is not None and wanted.page_tokens < 1:
        raise RequestError(f"page_tokens {wanted.page_tokens}: must be at least 1")
    opened = None if draft is None else Draft.open(draft, config, drafts, context)
    kernels = open_device(place.device, place.kernels, config, options, wanted.page_tokens, draft)
    page_tokens = wanted.page_tokens or (PAGE_TOKENS if kernels is None else kernels.page_tokens)
    usable = wanted.cache_pages
    if usable is None:
        usable = options.max_requests * -(-(context + drafts) // page_tokens)
    if usable < 1:
        raise RequestError(f"cache_pages {usable}: must be at least 1")
    caches = _caches(config, options, usable, page_tokens)
    weights, codec = checkpoint.weights(Shard(0, 1)), TextCodec(directory)
    if kernels is not None:
        decoder = kernels.decoder(weights, caches)
        return Parts(config, DeviceEngine(config, options, decoder), decoder.caches, codec, context)
    taps = None if opened is None else opened.taps
    packed: Any = None
    specialised: Any = None
    if options.backend == "latency_specialized":
        packed = pack(config, weights, options, progress)
        specialised = specialise(config, packed, caches, options, taps)
    engine = Engine(config, weights, caches, options, specialised, taps)
    if opened is None or drafting is None:
        return Parts(config, engine, caches, codec, context)
    own = allocate_caches(
        opened.backbone, usable + 1, 1, page_tokens, options.precision, latent_dtype=options.latent_dtype
    )
    make = DrafterFactory(opened, weights, own, options, context + drafts, specialised, packed)
    speculator = Speculator(drafting.options, opened.taps, make, page_tokens)
    room = Room(
        range(1, caches.pages), range(1, caches.slots), page_tokens, options.slots_per_request, options.recovers
    )
    speculator.rehearse(engine.rehearse, options.max_requests, room)
    return Parts(config, engine, caches, codec, context, speculator)


def _caches(config: ModelConfig, options: EngineOptions, usable: int, page_tokens: int) -> Caches:
    """So many pages and the slots of all requests, and the null page and slot."""
    return allocate_caches(
        config,
        usable + 1,
        options.max_requests * options.slots_per_request + 1,
        page_tokens,
        options.precision,
        options.drafts,
        latent_dtype=options.latent_dtype,
        recovers=options.recovers,
        state_dtype=options.recurrent_dtype,
    )


def default_context(config: ModelConfig, draft: str | Path | None, drafts: int) -> int:
    """The model's context, at most MOST_CONTEXT and what the draft has positions for."""
    context = min(config.max_positions, MOST_CONTEXT)
    return context if draft is None else min(context, DraftConfig.from_file(draft).max_positions - drafts)
