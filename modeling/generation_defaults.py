"""Sampling defaults of a checkpoint: what generation_config.json says, with everything else off."""

from __future__ import annotations

from dataclasses import dataclass

from nxdi_qwen.modeling.config_checks import boolean, integer, number
from nxdi_qwen.modeling.config_section import ConfigSection
from nxdi_qwen.modeling.errors import InputError


@dataclass(frozen=True)
class GenerationDefaults:
    """How to sample when the user says nothing; the defaults mean "off". End tokens stand in ModelConfig.

    `temperature` divides the logits, `top_k` keeps that many tokens (0: all), `top_p` keeps the smallest set of at
    least that probability, `min_p` those of at least that share of the largest probability, `repetition_penalty`
    divides (or multiplies, below zero) the logits of tokens already seen. Raises InputError for values out of range.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        boolean("do_sample", self.do_sample)
        number("temperature", self.temperature, minimum=0)
        integer("top_k", self.top_k, minimum=0)
        number("repetition_penalty", self.repetition_penalty, above=0)
        if number("top_p", self.top_p, above=0) > 1:
            raise InputError(f"top_p must be at most 1, got {self.top_p}")
        if number("min_p", self.min_p, minimum=0) > 1:
            raise InputError(f"min_p must be at most 1, got {self.min_p}")


def read_generation_defaults(section: ConfigSection) -> GenerationDefaults:
    """The defaults in the object of a generation_config.json. Raises InputError for values out of range."""
    names = GenerationDefaults.__dataclass_fields__
    return GenerationDefaults(**{name: value for name in names if (value := section.get(name)) is not None})
