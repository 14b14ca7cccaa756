"""One step of vLLM's scheduler on the slots of an artifact: states from this package's graphs, tokens from vLLM's own
sampler.

vLLM's block numbers are accounting only: a request's state lies in its slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsTensors, ModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from nxdi_qwen.serving import versions
from nxdi_qwen.serving.slots import SlotTable
from nxdi_qwen.serving.targets import SlotModel

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Step:
    """What `execute` leaves for `sample`: logits [requests, V] in the order of the batch."""

    scheduled: SchedulerOutput
    logits: Tensor
    prompt_logprobs: dict[str, LogprobsTensors | None]


class Runner:
    """`execute` encodes and decodes what the scheduler chose, `sample` draws the next token of each of these requests.

    A request whose state is gone, because it was preempted, is encoded again from all its tokens, into whatever slot:
    encoding starts from nothing that a slot holds.
    """

    def __init__(self, config: VllmConfig, model: SlotModel) -> None:
        self.model = model
        self.table = SlotTable(len(model.lengths))
        self._requests: dict[str, CachedRequestState] = {}
        self._batch = versions.make_input_batch(config, _CPU)
        self._sampler = Sampler(logprobs_mode=config.model_config.logprobs_mode)
        self._raw_logits = config.model_config.logprobs_mode in ("raw_logits", "processed_logits")
        self._step: _Step | None = None

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Runs the graphs; None where `sample` has to follow."""
        for request in scheduled.finished_req_ids:
            self.release(request)
            self._requests.pop(request, None)
            self._batch.remove_request(request)
        self._update_batch(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        logits: dict[str, Tensor] = {}
        prompt_logprobs: dict[str, LogprobsTensors | None] = {}
        tokens_of_next: dict[str, int] = {}
        for request, count in scheduled.num_scheduled_tokens.items():
            state = self._requests[request]
            if state.num_computed_tokens + count != state.num_tokens:
                raise RuntimeError(
                    f"{count} tokens of request {request} were scheduled behind {state.num_computed_tokens} of its "
                    f"{state.num_tokens}: prompts are encoded whole"
                )
            if count == 1 and request in self.table and state.num_computed_tokens:
                tokens_of_next[request] = state.get_token_id(state.num_tokens - 1)
            else:
                logits[request] = self._encode(request, scheduled, prompt_logprobs)
        if tokens_of_next:
            decoded = self.model.decode({self.table[request]: token for request, token in tokens_of_next.items()})
            logits |= {request: decoded[self.table[request]] for request in tokens_of_next}
        rows = torch.stack([logits[request] for request in self._batch.req_ids])
        self._step = _Step(scheduled, rows, prompt_logprobs)
        return None

    @torch.inference_mode()
    def sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """The next token of every request of the step, within the grammars of those that have one."""
        step, self._step = self._step, None
        if step is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if grammar is not None:
            apply_grammar_bitmask(step.scheduled, grammar, self._batch, step.logits)
        sampled = self._sampler(step.logits, self._batch.sampling_metadata)
        tokens = sampled.sampled_token_ids.tolist()
        requests = list(self._batch.req_ids)
        for request, new in zip(requests, tokens, strict=True):
            self._requests[request].output_token_ids.extend(new)
        return ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: row for row, request in enumerate(requests)},
            sampled_token_ids=tokens,
            logprobs=None if sampled.logprobs_tensors is None else sampled.logprobs_tensors.tolists(),
            prompt_logprobs_dict=step.prompt_logprobs,
            pooler_output=[],
        )

    def release(self, request: str) -> int | None:
        """Frees the slot of a request that ended or was preempted; returns it."""
        return self.table.release(request)

    def _update_batch(self, scheduled: SchedulerOutput) -> None:
        """Makes vLLM's record of sampling options hold exactly the requests of this step."""
        cached = scheduled.scheduled_cached_reqs
        for request in set(self._batch.req_id_to_index) - set(scheduled.num_scheduled_tokens):
            self._batch.remove_request(request)
        for request, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._requests[request].num_computed_tokens = computed
            if request not in self._batch.req_id_to_index:
                self._batch.add_request(self._requests[request])
        for new in scheduled.scheduled_new_reqs:
            self._requests[new.req_id] = _request_state(new)
            self._batch.add_request(self._requests[new.req_id])
        self._batch.condense()
        self._batch.refresh_metadata()

    def _encode(
        self,
        request: str,
        scheduled: SchedulerOutput,
        prompt_logprobs: dict[str, LogprobsTensors | None],
    ) -> Tensor:
        """Logits [V] after the last token. The first time, the prompt's logprobs as well where they were asked for."""
        if request not in self.table and not self.table.free:
            # vLLM does not name the requests that it preempted; they are those that hold a slot and do not run.
            for preempted in self.table.holders_outside(scheduled.num_scheduled_tokens):
                self.release(preempted)
        slot = self.table[request] if request in self.table else self.table.take(request)
        state = self._requests[request]
        assert state.sampling_params is not None and state.prompt_token_ids is not None
        tokens = [*state.prompt_token_ids, *state.output_token_ids]
        wanted = state.sampling_params.prompt_logprobs
        if wanted is None or state.output_token_ids:
            return self.model.prefill(slot, tokens)
        parts, done = [], 0
        for logits in self.model.prefill_blocks(slot, tokens):
            following = torch.tensor(tokens[done + 1 : done + 1 + len(logits)], dtype=torch.int64)
            done += len(logits)
            last, logits = logits[-1], logits[: len(following)]
            if not len(following):
                continue  # nothing comes after the prompt's last token, and vLLM takes no empty tensor
            scores = logits if self._raw_logits else self._sampler.compute_logprobs(logits)
            count = logits.shape[-1] if wanted == -1 else wanted
            parts.append(self._sampler.gather_logprobs(scores, count, following))
        prompt_logprobs[request] = _joined(parts) if parts else LogprobsTensors.empty_cpu(0, wanted + 1)
        return last


def _request_state(new: NewRequestData) -> CachedRequestState:
    params = new.sampling_params
    assert params is not None and new.prompt_token_ids is not None
    generator = None
    if params.sampling_type == SamplingType.RANDOM_SEED:
        generator = torch.Generator(_CPU)
        generator.manual_seed(params.seed)
    return CachedRequestState(
        req_id=new.req_id,
        prompt_token_ids=new.prompt_token_ids,
        mm_features=[],
        sampling_params=params,
        generator=generator,
        block_ids=([],),
        num_computed_tokens=new.num_computed_tokens,
        output_token_ids=[],
    )


def _joined(parts: list[Any]) -> LogprobsTensors:
    """Of consecutive positions. vLLM sends these three to the client as they are."""
    ids, logprobs, ranks = (torch.cat([part[number] for part in parts]) for number in range(3))
    return LogprobsTensors(ids, logprobs, ranks)
