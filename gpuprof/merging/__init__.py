"""The operator graph merger (USHER, OSDI'24, §2.4 and §3.4): several ONNX models become one graph.

Operators whose weights are the same are run once over the concatenated inputs of all models, so the shared
weights are held and read once. The files follow the paper's steps: `similarity` (§2.4), `architecture` (§3.4.1),
`matching` (§3.4.2), `super_operator` (§3.4.3); `merger` puts the graph together, `gain` says what it is worth,
and `proof` that it computes the same.
"""
