"""Made-up benchmark records: seconds from a small cost model, figures from these seconds, the same ones every time."""

import hashlib
import json

import numpy as np

from blockpilot_hf.evaluation_rules import ALL, ENOUGH_PROMPTS, GROUPS

TRAINING_SIZE = 8
SIZES = (2, 3, 4, 6, 8)
# Accepted tokens for sure at size 8, and prompts, by group; `translation` has too few for a claim.
DIFFICULTY = {"maths": 0.74, "code": 0.7, "qa": 0.52, "summary": 0.56, "translation": 0.44, "writing": 0.42}
COUNTS = {"maths": 24, "code": 22, "qa": 21, "summary": 20, "translation": 9, "writing": 24}
CONTEXT = {"maths": 90, "code": 160, "qa": 420, "summary": 1100, "translation": 60, "writing": 70}
NOT_RUN = "it is not installed. Install it with `pip install dflash`."
PLAIN_S, CONTEXT_S, PREFILL_S = 0.021, 2.5e-6, 0.0011
METHODS = {
    "plain": ("plain generate", "plain"),
    "stock_dflash": ("transformers DFlash", "peer"),
    "prompt_lookup": ("prompt lookup", "peer"),
    "dflash": ("dflash 0.1.0", "peer"),
    **{f"size {size}": (f"block size {size}", "fixed") for size in SIZES},
    "paper": ("paper's rule", "ours"),
    "seconds": ("by seconds, per prompt", "ours"),
    "flight": ("in flight", "ours"),
}


def make_record(dtype="float32", *, counts=COUNTS, temperatures=(0.0, 1.0), not_run=("dflash",), sets=("embedded",)):
    """A record as `blockpilot benchmark` writes it."""
    rng = np.random.default_rng(len(dtype))
    methods = {
        name: {"title": title, "kind": kind, "is_default": name == "flight", "reason": NOT_RUN * (name in not_run)}
        for name, (title, kind) in METHODS.items()
    }
    ran = [name for name in methods if name not in not_run]
    rows = [
        _row(rng, name, group, i, temperature, ran, 1.0 if dtype == "float32" else 1.3)
        for temperature in temperatures for name in sets for group, count in counts.items() for i in range(count)
    ]  # fmt: skip
    shown = [ALL] if len(sets) == 1 else [*sets, ALL]
    results = [_result(rows, temperature, name, ran, list(counts)) for temperature in temperatures for name in shown]
    return {
        "run_info": {
            "command": "blockpilot benchmark --preset full", "started_utc": "2026-01-02T03:00:00+00:00",
            "finished_utc": "2026-01-02T03:48:00+00:00", "commit": "0123456789abcdef", "status": "whole",
            "num_processes": 1,
        },
        "meta_info": {
            "versions": {"blockpilot-hf": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "machine": {
                "dtype": dtype, "is_packed": True, "device": "cpu", "device_name": "AMD EPYC", "num_threads": 2,
            },
            "target": {"name": "SmolLM2-135M-Instruct", "fingerprint": "t" * 16},
            "drafter": {"name": "DFlash-b8", "fingerprint": "d" * 16, "training_block_size": TRAINING_SIZE},
            "policies": {"policy": {"fingerprint": "p" * 16, "block_sizes": list(SIZES)}},
            "prompts": [{"name": name, "num_prompts": sum(counts.values()), "sha256": "0" * 64} for name in sets],
        },
        "settings": {
            "temperatures": list(temperatures), "max_new_tokens": 64, "limit": None, "seed": 0, "repeats": 1,
            "warm_up_tokens": 8, "num_resamples": 10_000,
        },
        "methods": methods,
        "costs": {},
        "results": results,
        "per_prompt": rows,
    }  # fmt: skip


def _row(rng, name, group, i, temperature, ran, factor):
    share = float(np.clip(DIFFICULTY[group] - 0.07 * temperature + 0.07 * rng.standard_normal(), 0.1, 0.93))
    context = int(np.clip(CONTEXT[group] * np.exp(0.45 * rng.standard_normal()), 12, 4000))
    num_new = int(rng.integers(40, 64))
    calls = {method: _call(rng, method, share, context, num_new, factor) for method in ran}
    plain = calls["plain"]
    for method, call in calls.items():
        differs = method != "plain" and temperature == 0 and rng.random() < 0.02
        call["text_hash"] = f"{plain['text_hash']}{'x' * differs}"
        call |= {"first_difference": 17, "gap": 1e-6} if differs else {"first_difference": None, "gap": None}
    prompt_id = f"{group}-{i}"
    return {
        "set": name, "prompt": prompt_id, "category": GROUPS[group][0], "turn": 0, "temperature": temperature,
        "repeat": 0, "prompt_hash": hashlib.sha256(prompt_id.encode()).hexdigest(), "num_prompt_tokens": context,
        "order": list(ran), "calls": calls,
    }  # fmt: skip


def _call(rng, method, share, context, num_new, factor):
    """One call; `factor` is how much more a wide pass costs."""
    step_s, prefill_s, policy_s, size = PLAIN_S + CONTEXT_S * context, PREFILL_S * context * 0.4 + 0.01, 0.0, None
    by_size = {one: 1 + sum(share**k for k in range(1, one)) for one in SIZES}
    drafts = {one: (0.0034 + 0.00028 * one) * factor for one in SIZES}
    verifies = {one: step_s * (1 + 0.052 * (one - 1) * factor) for one in SIZES}
    rates = {one: by_size[one] / (drafts[one] + verifies[one]) for one in SIZES}
    other_s, is_split = 0.0006, True
    if method == "plain":
        tau, draft_s, verify_s, other_s = 1.0, 0.0, step_s, 0.0008
    elif method == "prompt_lookup":
        tau, draft_s, verify_s = 1.08 + 0.4 * (context > 700) * rng.random(), 0.0003, step_s * 1.12
        is_split, other_s = False, 0.001
    elif method == "stock_dflash":
        tau, draft_s, verify_s, is_split, other_s = by_size[8], drafts[8] * 1.5, verifies[8] * 1.2, False, 0.004
    else:
        size = int(method.split()[1]) if method.startswith("size ") else max(SIZES, key=lambda one: rates[one])
        if method == "paper":
            size = 8 if share > 0.6 else 6
        policy_s = 0.0 if method.startswith("size ") else 0.002
        tau, draft_s, verify_s = by_size[size], drafts[size], verifies[size]
        if method == "flight":
            size, draft_s, verify_s, tau = None, draft_s * 0.97, verify_s * 0.96, tau * 1.03
    tau = float(np.clip(tau * (1 + 0.04 * rng.standard_normal() * (method != "plain")), 1, 8))
    num_steps = (num_new - 1) / tau
    noise = 1 + 0.025 * rng.standard_normal(2)
    parts = {"draft_s": draft_s, "verify_s": verify_s, "other_s": other_s}
    parts = {part: float(seconds * num_steps * noise[0]) for part, seconds in parts.items()}
    decode_s, prefill_s = sum(parts.values()), float(prefill_s * noise[1])
    return {
        "total_s": prefill_s + policy_s + decode_s, "prefill_s": prefill_s, "policy_s": policy_s, "decode_s": decode_s,
        **(parts if is_split else dict.fromkeys(parts)), "num_new_tokens": num_new, "num_steps": round(num_steps),
        "acceptance_length": tau, "block_size": size, "text_hash": f"{context}-{num_new}",
    }  # fmt: skip


def _interval(values):
    """The mean, and what a normal distribution would give for it."""
    values = np.asarray(values, dtype=float)
    mean, error = float(values.mean()), float(1.96 * values.std() / np.sqrt(len(values)))
    return {"estimate": mean, "low": mean - error, "high": mean + error}


def _result(rows, temperature, name, ran, groups):
    rows = [row for row in rows if row["temperature"] == temperature and name in (ALL, row["set"])]
    found = {}
    for group in (*groups, ALL):
        chosen = [row for row in rows if group in (ALL, row["prompt"].split("-")[0])]
        found[group] = {
            "num_prompts": len(chosen), "is_enough": len(chosen) >= ENOUGH_PROMPTS,
            "methods": {method: _told([row["calls"] for row in chosen], method) for method in ran},
        }  # fmt: skip
    return {"temperature": temperature, "set": name, "num_prompts": len(rows), "groups": found}


def _told(calls, method):
    own = [call[method] for call in calls]
    speeds = np.array([one["plain"]["total_s"] / one[method]["total_s"] for one in calls])
    decode = np.array([one["plain"]["decode_s"] / one[method]["decode_s"] for one in calls])
    ours = np.array([one[method]["total_s"] / one["flight"]["total_s"] for one in calls])
    tokens = sum(call["num_new_tokens"] for call in own)
    is_split = own[0]["draft_s"] is not None
    told = {
        "speedup": _interval(speeds), "decode_speedup": _interval(decode), "over_default": _interval(ours),
        "acceptance_length": _interval([call["acceptance_length"] for call in own]),
        "tokens_per_second": _interval([call["num_new_tokens"] / call["total_s"] for call in own]),
        "bound": None, "of_bound": None, "overhead_share": None, "least_speedup": float(speeds.min()),
        "num_slow": int((speeds < 0.95).sum()),
        "num_identical": sum(one[method]["text_hash"] == one["plain"]["text_hash"] for one in calls),
    }  # fmt: skip
    told["num_explained"] = len(calls) - told["num_identical"]
    if is_split and method != "plain":
        shares = np.array([call["other_s"] / call["decode_s"] for call in own])
        told |= {"bound": _interval(decode / (1 - shares)), "of_bound": _interval(1 - shares)}
        told["overhead_share"] = _interval(shares)
    told["seconds_per_token"] = {
        part: sum(call[f"{part}_s"] for call in own) / tokens if is_split or part in ("prefill", "policy") else None
        for part in ("prefill", "policy", "draft", "verify", "other")
    }
    return told | {"spread": None}


def save_record(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    return path
