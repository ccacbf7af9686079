"""The fields of a config.json. Every field is read, known to be harmless, or refused.

``check_all_read`` refuses a configuration with a field that nobody read, unless it is null or on
``IGNORED``, because an unknown field may change the arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from splitup.core import limits
from splitup.core.errors import InvalidModel

# Fields that change no logits: training, generation defaults, names, versions, remote code for
# classes that are built in here, and the dtype, which is in the weights' file.
IGNORED: Final = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version use_cache
    cache_implementation initializer_range initializer_factor attention_dropout hidden_dropout
    resid_pdrop embd_pdrop pretraining_tp bos_token_id eos_token_id pad_token_id sep_token_id
    decoder_start_token_id forced_bos_token_id forced_eos_token_id auto_map tokenizer_class
    name_or_path _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset
    _sliding_window_pattern output_attentions output_hidden_states output_scores return_dict
    return_dict_in_generate id2label label2id num_labels problem_type finetuning_task
    task_specific_params prefix chunk_size_feed_forward torchscript tf_legacy_loss
    use_bfloat16 unsloth_fixed unsloth_version max_length min_length max_new_tokens do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences suppress_tokens
    begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty is_llama_config
    transformers.js_config model_max_length
    """.split()
)
# Fields that change the arithmetic when they are set; families that support one read it.
OFF: Final = (
    "is_encoder_decoder",
    "is_decoder",
    "add_cross_attention",
    "cross_attention_hidden_size",
    "tie_encoder_decoder",
    "pruned_heads",
    "lm_head_bias",
    "rope_interleaved",
    "use_mrope",
    "quantization_config",
    "compression_config",
)


class Fields:
    """One JSON object of a configuration; messages call it ``name``."""

    def __init__(self, table: dict[str, Any], name: str = "config.json") -> None:
        self._table, self._name = table, name
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Say whether the field is there and not null."""
        return self._table.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field's value, or ``default`` when it is absent or null."""
        self._read.add(key)
        value = self._table.get(key)
        return default if value is None else value

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename fields; one that is there under both names must be equal."""
        for old, new in names.items():
            if old in self and new in self and self._table[old] != self._table[new]:
                raise InvalidModel(f"{self._name} has another {old} than {new}: they mean the same")
            if old in self:
                self._table = {**self._table, new: self._table[old]}
            self._read.add(old)

    def refuse(self, key: str, supported: str) -> InvalidModel:
        """Return the error for a field's value."""
        value = self._table.get(key)
        return InvalidModel(f"{self._name} asks for {key} = {value!r:.80}; supported: {supported}")

    def get_integer(
        self,
        key: str,
        default: int | None = None,
        most: int = limits.MAX_DIMENSION,
        *,
        least: int = 1,
    ) -> int:
        """Return an integer from ``least`` to ``most``; a field without default must be there."""
        value = self._require(key, default)
        if type(value) is not int or not least <= value <= most:
            kind = "a positive integer" if least else "0 or a positive integer"
            bound = "" if most == limits.MAX_DIMENSION else f" of at most {most}"
            raise InvalidModel(f"{self._name} has {key} = {value!r:.40}; {kind}{bound} is wanted")
        return value

    def get_number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number; a field without default must be there."""
        value = self._require(key, default)
        if not _is_positive(value):
            raise InvalidModel(
                f"{self._name} has {key} = {value!r:.40}; a positive number is wanted"
            )
        return float(value)

    def get_numbers(self, key: str, count: int) -> list[float]:
        """Return ``count`` positive numbers."""
        values = self._require(key, None)
        is_list = isinstance(values, list) and len(values) == count
        if not is_list or not all(map(_is_positive, values)):
            raise InvalidModel(
                f"{self._name} has {key} = {values!r:.40}; {count} positive numbers are wanted"
            )
        return [float(value) for value in values]

    def get_written(self, key: str) -> Any:
        """Return a field that must be there and may be null, which means none."""
        if key not in self._table:
            raise InvalidModel(f"{self._name} has no {key}; write the number, or null for none")
        return self.get(key)

    def get_cap(self, key: str) -> float | None:
        """Return a positive number, or None for null; the field must be there."""
        return None if self.get_written(key) is None else self.get_number(key)

    def get_flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise InvalidModel(f"{self._name} has {key} = {value!r:.40}; true or false is wanted")
        return value

    def get_words(
        self, key: str, count: int, known: Collection[str], *, is_needed: bool = False
    ) -> list[str] | None:
        """Return a list of ``count`` known words, None when it is absent and not needed."""
        words: list[str] | None = self.get(key)
        if words is None and not is_needed:
            return None
        is_list = isinstance(words, list) and len(words) == count
        if not is_list or any(word not in list(known) for word in words or ()):
            raise self.refuse(key, f"{count} of {', '.join(known)}")
        return words

    def skip(self, *keys: str) -> None:
        """Read fields that change nothing in this architecture."""
        self._read.update(keys)

    def get_fields(self, key: str) -> Fields | None:
        """Return a nested object, or None when it is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InvalidModel(f"{self._name} has {key} = {value!r:.40}; an object is wanted")
        return Fields(value, f"{self._name}'s {key}")

    def take(self, outer: str, key: str) -> Any:
        """Remove a field of a nested object and return its value, None when it is absent."""
        nested = self._table.get(outer)
        if not isinstance(nested, dict) or key not in nested:
            return None
        rest = {name: value for name, value in nested.items() if name != key}
        self._table = {**self._table, outer: rest}
        return nested[key]

    def expect(self, key: str, wanted: Any) -> None:
        """Raise InvalidModel unless a field is absent, null or exactly this."""
        if self.get(key, wanted) != wanted or type(self.get(key, wanted)) is not type(wanted):
            raise self.refuse(key, f"{wanted!r:.60}")

    def expect_all(self, wanted: Mapping[str, Any]) -> None:
        """Raise InvalidModel unless each field is absent, null or exactly this."""
        for key, value in wanted.items():
            self.expect(key, value)

    def check_all_read(self) -> None:
        """Raise InvalidModel for a field that was not read and may change the arithmetic."""
        for key in OFF:
            if key not in self._read and self.get(key):
                raise self.refuse(key, "null or false")
        for key in self._table:
            if key not in self._read | IGNORED and key in self:
                raise InvalidModel(
                    f"{self._name} has the field {key!r:.80}, which means nothing in this "
                    "architecture here: delete it if it does not change what the model computes"
                )

    def _require(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise InvalidModel(
                f"{self._name} has no {key}, which this architecture needs: write it there"
            )
        return value


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e30
