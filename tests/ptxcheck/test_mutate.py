"""Mutants differ from the module in one line, of the lines that were asked for."""

from ptxcheck.mutate import mutants
from support.ptx import OWN_GLOBAL, OWN_WORD, kernel

BODY = f"""{OWN_WORD}{OWN_GLOBAL}
ld.global.b32 %r5, [%d8];
st.shared.b32 [%r2], %r5;
bar.sync 0;
ld.shared.b32 %r6, [%r3];
setp.lt.s32 %p1, %r6, 7;
@%p1 bra $END;
atom.acq_rel.gpu.global.add.u32 %r7, [%d1], 1;
st.global.b32 [%d9], %r6;
$END:
"""


def test_every_mutant_changes_one_line() -> None:
    ptx = kernel(BODY)
    rows = ptx.split("\n")
    made = mutants(ptx, 100, seed=1)
    assert len({(m.line, m.after) for m in made}) > 15
    kinds = {m.kind for m in made}
    assert {"barrier gone", "store gone", "order weaker", "scope narrower", "address moved", "comparison"} <= kinds
    assert {"constant off by one", "branch inverted", "register"} <= kinds
    for mutant in made:
        changed = mutant.text.split("\n")
        assert [k + 1 for k in range(len(rows)) if rows[k] != changed[k]] == [mutant.line]


def test_lines_count_and_seed() -> None:
    ptx = kernel(BODY)
    barrier = next(k for k, row in enumerate(ptx.split("\n"), 1) if "bar.sync" in row)
    only = mutants(ptx, 5, seed=1, lines={barrier})
    assert [(m.kind, m.line) for m in only] == [("barrier gone", barrier)]
    assert mutants(ptx, 9, seed=2) == mutants(ptx, 9, seed=2)
    assert len(mutants(ptx, 9, seed=2)) == 9
