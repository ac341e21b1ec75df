from ppo_ds.tracking.banner import Banner, titled


def test_the_summary_comes_before_notes_that_were_made_earlier():
    banner = Banner()
    banner.note("changed    algo.gae.lam 0.9 -> 1.0")
    banner.summarize("2 rank(s) on CPU", titled("threads", "1"))
    banner.warn("rollout.backend=auto passes over static")
    banner.note(*[])
    assert banner.render().splitlines() == [
        "2 rank(s) on CPU",
        "threads    1",
        "changed    algo.gae.lam 0.9 -> 1.0",
        "warning    rollout.backend=auto passes over static",
    ]
