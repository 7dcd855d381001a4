#!/usr/bin/env python3
"""Draws how a job goes through an interruption, as an SVG for the README.

    scripts/draw_interruption.py >docs/interruption.svg

It has its own background, light or dark as the reader's system is. A browser needs nothing else to
show it.
"""

from html import escape

WIDTH, HEIGHT = 880, 330  # px
LEFT, STEP = 150, 66  # px: where the first step is, and the distance between two steps
BOX_WIDTH, BOX_HEIGHT = 50, 26  # px
STEPS = 10
CHECKPOINT, KILLED = 4, 6  # the last step that each of them has
ALONE_Y, FIRST_Y, SECOND_Y = 60, 150, 250  # px: the rows, top down

STYLE = """
  .paper { fill: #ffffff; stroke: #d0d7de }
  text { fill: #1f2328; font: 13px system-ui, sans-serif }
  .note { fill: #59636e; font-size: 12px }
  .step { fill: #ddf4ff; stroke: #0969da }
  .again { fill: #fff8c5; stroke: #9a6700 }
  .line { fill: none; stroke: #59636e; stroke-width: 1.5 }
  .same { fill: none; stroke: #1a7f37; stroke-width: 1.5; stroke-dasharray: 4 3 }
  .kill { stroke: #cf222e; stroke-width: 3 }
  .killed { fill: #cf222e }
  .result { fill: #1a7f37; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .note { fill: #9198a1 }
    .step { fill: #0c2d6b; stroke: #4493f8 }
    .again { fill: #4b2900; stroke: #d29922 }
    .line { stroke: #9198a1 }
    .same { stroke: #3fb950 }
    .kill { stroke: #f85149 }
    .killed { fill: #f85149 }
    .result { fill: #3fb950 }
  }
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return an element with a line of text, whose baseline is at y."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def path(points: str, kind: str) -> str:
    """Return a line through points, in SVG's language of paths."""
    return f'<path class="{kind}" d="{points}"/>'


def center(step: int) -> int:
    """Return the x of a step's middle; steps count from 1."""
    return LEFT + (step - 1) * STEP + BOX_WIDTH // 2


def row(y: int, name: str, steps: range, again: int = 0) -> list[str]:
    """Return a row of steps, of which those up to `again` are done for the second time."""
    elements = [text(20, y + 18, name)]
    for step in steps:
        kind = "again" if step <= again else "step"
        elements.append(
            f'<rect class="{kind}" x="{center(step) - BOX_WIDTH // 2}" y="{y}" '
            f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        )
        elements.append(text(center(step), y + 18, str(step), anchor="middle"))
    return elements


def drawing() -> str:
    """Return the whole picture."""
    middle = BOX_HEIGHT // 2
    end = center(STEPS) + BOX_WIDTH // 2
    killed_x = center(KILLED) + BOX_WIDTH // 2 + 18
    saved_x = center(CHECKPOINT)
    note_y = FIRST_Y + BOX_HEIGHT + 34
    elements = [
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        text(LEFT, 36, "steps of training", "note"),
        *row(ALONE_Y, "left alone", range(1, STEPS + 1)),
        *row(FIRST_Y, "interrupted", range(1, KILLED + 1)),
        *row(SECOND_Y, "started again", range(CHECKPOINT + 1, STEPS + 1), again=KILLED),
        # the kill
        path(f"M{killed_x - 8} {FIRST_Y + middle - 8}l16 16m0 -16l-16 16", "kill"),
        text(killed_x + 18, FIRST_Y + middle + 5, "killed", "killed"),
        # the checkpoint
        path(f"M{saved_x} {FIRST_Y + BOX_HEIGHT}V{SECOND_Y + middle}h26", "line"),
        path(f"M{saved_x + 20} {SECOND_Y + middle - 5}l7 5l-7 5", "line"),
        text(saved_x - 10, note_y, f"checkpoint after step {CHECKPOINT}", "note", "end"),
        text(saved_x - 10, note_y + 16, "and a journal of later steps", "note", "end"),
        # what is compared
        *(
            path(f"M{center(step)} {FIRST_Y + BOX_HEIGHT + 2}V{SECOND_Y - 2}", "same")
            for step in range(CHECKPOINT + 1, KILLED + 1)
        ),
        text(center(KILLED) + 12, note_y, "done again, and compared with the journal:", "note"),
        text(
            center(KILLED) + 12, note_y + 16, "the same bits, or a line names what differs", "note"
        ),
        # how both end
        path(f"M{end} {ALONE_Y + middle}h16V{SECOND_Y + middle}h-16", "same"),
        text(end, SECOND_Y + BOX_HEIGHT + 28, "both end with the same weights", "result", "end"),
    ]
    body = "\n".join(elements)
    title = "A job is killed, started again, and ends with the weights of a job left alone"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    print(drawing(), end="")
