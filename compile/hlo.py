"""The HLO target: every graph of an NxDI application as the module that neuronx-cc would be given, with a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdi_qwen.compile.artifact import written_atomically
from nxdi_qwen.compile.hlo_report import Report, report
from nxdi_qwen.compile.lowering import LoweredGraph, lower, named_tensors
from nxdi_qwen.compile.manifest import HLO_REPORT
from nxdi_qwen.compile.neuron import application_of
from nxdi_qwen.compile.neuron_options import NeuronOptions
from nxdi_qwen.compile.source import ModelSource, Progress, no_progress
from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM
from nxdi_qwen.modeling.nxdi.tracing import as_rank, traced_modules

TARGET = "hlo"
GRAPHS = "graphs"

GraphName = tuple[str, int]
"""Tag of the submodel, and bucket."""


@dataclass(frozen=True)
class GraphReport:
    """One graph. `ranks` are those whose module is this very one; `file` is the module's, below the artifact."""

    tag: str
    bucket: int
    ranks: list[int]
    file: str
    report: Report

    def as_dict(self) -> dict[str, Any]:
        place = {"tag": self.tag, "bucket": self.bucket, "ranks": self.ranks, "file": self.file}
        return {**place, **self.report.as_dict()}


def lower_application(
    application: NeuronHybridForCausalLM, rank: int = 0, device: str = "cpu"
) -> dict[GraphName, LoweredGraph]:
    """One rank's graphs. Weights are uninitialised, on the `device` "meta" not even allocated; `LoweredGraph.run` takes
    the ones to use.
    """
    return dict(_lowered(application, rank, device))


def compile_hlo(
    source: ModelSource, out: Path, options: NeuronOptions, progress: Progress = no_progress
) -> list[GraphReport]:
    """Lowers every graph of every rank and writes the modules and `report.json` into the new folder `out`, atomically.

    Weights are neither read nor allocated. `progress` stage: "graphs" (graphs lowered, over all ranks). Raises
    InputError before anything is computed where source, options or destination do not fit.
    """
    application = application_of(source, options)
    degree = options.shared.degree
    total = degree * sum(len(model.neuron_config.buckets) for model in application.models)
    reports: list[GraphReport] = []
    ranks: dict[tuple[GraphName, bytes], list[int]] = {}
    with written_atomically(out) as folder:
        (folder / GRAPHS).mkdir()
        done = 0
        # NxD compiles the graph of rank 0 for all ranks. Here it is seen whether it is theirs.
        for rank in range(degree):
            for name, graph in _lowered(application, rank, "meta"):
                progress("graphs", done, total)
                done += 1
                same = ranks.setdefault((name, graph.proto), [])
                same.append(rank)
                if len(same) == 1:
                    file = f"{GRAPHS}/{name[0]}-{name[1]}-rank{rank}.hlo.pb"
                    graph.save(folder / file)
                    reports.append(GraphReport(*name, same, file, report(graph)))
        progress("graphs", total, total)
        content = {
            "model": source.name,
            "degree": degree,
            "neuron_config": json.loads(application.config.to_json_string())["neuron_config"],
            "graphs": [each.as_dict() for each in reports],
        }
        (folder / HLO_REPORT).write_text(json.dumps(content, indent=2) + "\n")
    return reports


def _lowered(application: NeuronHybridForCausalLM, rank: int, device: str) -> Iterator[tuple[GraphName, LoweredGraph]]:
    with as_rank(application.neuron_config.tp_degree, rank):
        for traced in traced_modules(application, device):
            parameters = named_tensors(traced.module)
            yield (traced.tag, traced.bucket), lower(traced.module, traced.inputs, parameters, traced.aliases)
