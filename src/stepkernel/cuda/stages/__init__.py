"""One file per stage kind: a device function that all CTAs call together, over constexpr dims and a record.

`stage(cta, ctas, record, step, scratch, dims)`: CTA `cta` of `ctas` does its pieces of the work; `record` holds the
addresses, `step` the block of the step's inputs, `scratch` is a shared address of `dims.shared_bytes()`.
"""
