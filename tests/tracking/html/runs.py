"""Writes run directories by hand, as a run of each stage writes them."""

import json

import yaml

NASTY = "<script>document.title = 'owned'</script> </script> <img src=x onerror=alert(1)> a\u2028b \\u003c"
PROMPTS = ("What is 2 + 3?", "Name a colour.", NASTY, "写一首短诗")


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def ppo_metrics(step, steps):
    share = step / steps
    return {
        "step": step, "episodes": 8 * step, "tokens": 80 * step, "time": 2.0 * step,
        "reward/score_mean": 0.1 + 0.8 * share, "reward/score_std": 0.2,
        "reward/score_min": 0.0, "reward/score_max": 1.0,
        "rollout/zero_std_group_frac": 0.75, "kl/ref_seq_mean": 12.0 * share * share, "kl/target": 6.0,
        "policy/loss": -0.01 * share, "policy/clipfrac": 0.1, "policy/entropy": 2.0 - share,
        "value/loss": 1.0 - 0.9 * share, "rollout/resp_len_mean": 10.0 + step,
        "rollout/resp_len_max": 20.0 + step,
        "time/generate": 1.0, "time/update_actor": 0.6, "time/update_critic": 0.3, "time/other": 0.1,
        "time/step": 2.0, "mem/host_rss_gb": 0.7, "mem/alloc_peak_gb": 3.0, "mem/reserved_peak_gb": 4.0,
        "health/nonfinite": 0.0, "made_up/metric": 5.0,
    }  # fmt: skip


def sample(step, row, *, tokens):
    """A row of samples: scores grow with the row, every second response is cut off at its limit."""
    text = ["Step", f" {step}", " answer", f" {row}", "\n", "end"]
    count = len(text)
    columns = {
        "text": text, "ids": list(range(count)),
        "logprobs": [-0.1 * i for i in range(count)], "ref_logprobs": [-0.3] * count,
        "values": [0.5 - 0.2 * i for i in range(count)], "advantages": [-1.0 + 0.4 * i for i in range(count)],
        "rewards": [0.0] * (count - 1) + [1.0],
    }  # fmt: skip
    prompt = PROMPTS[row]
    return {
        "prompt": f"User: {prompt}", "asked": prompt, "response": "".join(text),
        "score": round(0.25 * row + 0.001 * step, 4),
        "components": {"length": 0.5, "style": 0.25 * row}, "kl": 3.0 - row, "length": count + row,
        "finish": "length" if row % 2 else "stop", "prompt_id": f"p{row}", "columns": {"answer": 5},
    } | ({"tokens": columns} if tokens else {})  # fmt: skip


def make_ppo_run(run_dir, *, name="demo", steps=20, lr=1e-6, tokens=True, events=True, summary=True):
    """Writes a run of PPO with held-out evaluations every 10 steps and samples of every 5th step."""
    run_dir.mkdir(parents=True)
    config = {
        "stage": "ppo", "run": {"name": name, "steps": 20, "dir": str(run_dir)},
        "actor": {"model": {"path": NASTY}, "optim": {"lr": lr}}, "data": {"mix": [], "path": None},
    }  # fmt: skip
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True), encoding="utf-8")
    records = [ppo_metrics(step, 20) for step in range(1, steps + 1)]
    for record in records[9::10]:
        record |= {"eval/accuracy": 0.4 + 0.02 * record["step"], "eval/score_mean": 0.5}
    lines(run_dir / "metrics.jsonl", records)
    for step in range(5, steps + 1, 5):
        rows = [sample(step, row, tokens=tokens) for row in range(4)]
        lines(run_dir / "samples" / f"step_{step:06d}.jsonl", rows)
    lines(run_dir / "samples" / "eval_step_000000.jsonl", [sample(0, 0, tokens=False) | {"kl": None}])
    if events:
        lines(
            run_dir / "events.jsonl",
            [
                {"step": 0, "time": 0.0, "kind": "started", "text": "started"},
                {"step": 8, "time": 16.0, "kind": "resumed", "text": "resumed from step 8"},
                {"step": 12, "time": 24.0, "kind": "rolled_back", "text": "back to step 11"},
                {"step": 15, "time": 30.0, "kind": "alarm", "text": f"KL 6.75: raise algo.kl.coef {NASTY}"},
            ],
        )
    if events and summary:
        with (run_dir / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": steps, "time": 252.0, "kind": "ended", "text": "done"}) + "\n")
    if summary:
        result = {"exit_reason": "done", "heldout_accuracy_before": 0.2, "wall_s": 252.0, "steps": steps}
        (run_dir / "summary.json").write_text(json.dumps(result), encoding="utf-8")
    return run_dir
