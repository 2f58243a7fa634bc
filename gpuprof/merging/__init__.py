"""The operator graph merger (USHER, OSDI'24, §2.4 and §3.4): several ONNX models become one graph.

Operators with equal weights run once over the concatenated inputs of all models, so shared weights are held and read
once. The files follow the paper's steps: `similarity` (§2.4), `groups` (§3.4.1, §3.4.2) and `plan`
(§3.4.3); `merger` builds the merged graph, `gain` predicts the time saved, and `proof` compares its
outputs with the originals'.
"""
