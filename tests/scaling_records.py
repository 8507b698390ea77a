"""Made-up scaling records: costs from a small model, figures from these costs, the same ones every time."""

import copy

from blockpilot_hf.scaling_summary import summarize_scaling

METHODS = {
    "plain": {"title": "plain generate", "kind": "plain", "is_default": False, "reason": ""},
    "size 8": {"title": "block size 8", "kind": "fixed", "is_default": False, "reason": ""},
    "flight": {"title": "in flight", "kind": "ours", "is_default": True, "reason": ""},
}
PROMPTS, ANSWERS = (64, 256, 1024), (32, 128)
# Tokens per step, and what a step costs beside a plain one.
TAU = {"plain": 1.0, "size 8": 2.0, "flight": 1.6}
STEP = {"plain": 1.0, "size 8": 1.8, "flight": 1.2}


def make_line(prompt_length, answer_length, repeat=0, *, slower=0.0, memory=True):
    """A cell's line, in which ours take `slower` more milliseconds for each token of the prompt."""
    calls = {}
    for name in METHODS:
        steps = (answer_length - 1) / TAU[name]
        extra = 0.0 if name == "plain" else slower * 1e-3 * prompt_length
        step_s = STEP[name] * (0.02 + 1e-5 * (prompt_length + answer_length)) + extra
        step_s *= 1 + 0.1 * repeat
        cache = 1000 * (prompt_length + answer_length)
        calls[name] = {
            "total_s": 0.01 * prompt_length + steps * step_s,
            "cpu_s": 0.01 * prompt_length + steps * step_s,
            "decode_cpu_s": steps * step_s,
            "prefill_s": 0.01 * prompt_length,
            "policy_s": 0.0,
            "decode_s": steps * step_s,
            "draft_s": 0.0,
            "verify_s": 0.9 * steps * step_s,
            "other_s": 0.1 * steps * step_s,
            "time_per_token_s": steps * step_s / (answer_length - 1),
            "num_new_tokens": answer_length,
            "num_steps": steps,
            "acceptance_length": TAU[name],
            "peak_memory_bytes": int(cache * (2 if name == "plain" else 2.5)) if memory else None,
            "target_cache_bytes": cache,
            "drafter_cache_bytes": 0 if name == "plain" else cache // 10,
        }
    return {
        "prompt_length": prompt_length,
        "answer_length": answer_length,
        "repeat": repeat,
        "order": [*METHODS],
        "calls": calls,
    }


def make_lines(*, prompts=PROMPTS, answers=ANSWERS, repeats=1, **more):
    pairs = dict.fromkeys([*((p, answers[0]) for p in prompts), *((prompts[0], a) for a in answers)])
    return [make_line(*pair, repeat, **more) for repeat in range(repeats) for pair in pairs]


def make_scaling_record(dtype="float32", **more):
    """A record as `blockpilot scaling` writes it."""
    lines = make_lines(**more)
    return {
        "run_info": {
            "command": "blockpilot scaling",
            "started_utc": "2026-01-02T03:00:00+00:00",
            "finished_utc": "2026-01-02T03:15:00+00:00",
            "commit": "0123456789abcdef",
            "status": "whole",
        },
        "meta_info": {
            "versions": {"blockpilot-hf": "0.1.0", "torch": "2.13.0"},
            "machine": {"dtype": dtype, "device": "cpu", "device_name": "AMD EPYC", "num_threads": 1},
            "target": {"name": "SmolLM2-135M-Instruct"},
            "drafter": {"name": "DFlash-b8", "training_block_size": 8},
            "policies": {},
            "prompts": "embedded",
        },
        "settings": {
            "prompt_lengths": sorted({line["prompt_length"] for line in lines}),
            "answer_lengths": sorted({line["answer_length"] for line in lines}),
            "left_out": [],
            "repeats": 1 + max(line["repeat"] for line in lines),
            "seed": 0,
            "memory": "kernel",
            "answers": "min_new_tokens = max_new_tokens",
        },
        "methods": copy.deepcopy(METHODS),
        "costs": {},
        "cells": lines,
        "summary": summarize_scaling(lines, [*METHODS]),
    }
