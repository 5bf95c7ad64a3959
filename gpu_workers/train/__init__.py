"""The training child, with nearly all code that imports torch. One process is started per attempt.

Names of tensors and arrays with two or more dimensions end with their shape, one letter per dimension:

    B  rows of a batch
    T  tokens of a row, or of packed rows
    N  tokens that are scored: those with a label
    V  vocabulary
    D  hidden size
    H  attention heads (fewer for keys and values where heads are grouped)
    E  size of one head
    I  inputs of a linear layer
    O  outputs of a linear layer
    R  rank of an adapter

So `ids_BT[b, t]` is token `t` of row `b`, and `up_OR @ down_RI` has the shape of `weight_OI`. Packed rows are a batch
of one: B is 1. Names that a library gives (`input_ids`, `labels`) stay as they are.
"""
