"""How far a download or a merge is."""

from sagemaker_lightning.rows import byte_progress


def test_a_line_comes_every_five_seconds(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(byte_progress.time, "monotonic", lambda: now[0])
    progress = byte_progress.ByteProgress("s3://b/\x1bk", 2_000_000_000, done=500_000_000)
    for seconds, done in ((4.9, 6e8), (5.0, 7e8), (9.9, 8e8), (10.0, 1e9)):
        now[0] = 100.0 + seconds
        progress.reach(int(done))
    assert capsys.readouterr().err.splitlines() == [
        "s3://b/\\x1bk: 700 of 2,000 MB, 40.0 MB/s, 32 s left",
        "s3://b/\\x1bk: 1,000 of 2,000 MB, 50.0 MB/s, 20 s left",
    ]


def test_where_nothing_comes_no_time_is_said(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(byte_progress.time, "monotonic", lambda: now[0])
    progress = byte_progress.ByteProgress("merging", 1_000_000)
    now[0] = 6.0
    progress.reach(0)
    assert capsys.readouterr().err == "merging: 0 of 1 MB, 0.0 MB/s\n"
