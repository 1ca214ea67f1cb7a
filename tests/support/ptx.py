"""Small kernels written by hand."""

REGISTERS = """
  .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .f32 %f<16>; .reg .b64 %d<16>;
  .shared .align 16 .b8 pool[4096];
"""


def kernel(body: str, parameters: int = 2) -> str:
    """A kernel whose pointers p0, p1, ... are in %d0, %d1, ...; %r0 is the thread, %r1 the CTA."""
    names = ", ".join(f".param .u64 p{k}" for k in range(parameters))
    loads = "\n".join(f"ld.param.u64 %d{k}, [p{k}];" for k in range(parameters))
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.visible .entry test({names}) {{
{REGISTERS}
{loads}
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
{body}
ret;
}}"""


# The word of this thread in shared memory: %r2 = address, %r3 = that of its mirror in a block of 64.
OWN_WORD = """
shl.b32 %r2, %r0, 2;
sub.s32 %r3, 252, %r2;
mov.u32 %r4, pool;
add.s32 %r2, %r2, %r4;
add.s32 %r3, %r3, %r4;
"""
# %d8: the 4-byte word of this thread at %d0, %d9 at %d1.
OWN_GLOBAL = """
mul.wide.u32 %d7, %r0, 4;
add.s64 %d8, %d0, %d7;
add.s64 %d9, %d1, %d7;
"""
