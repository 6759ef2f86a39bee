"""Training of k3-mini: a differentiable K3 text model in plain torch, quantisation in the loop, the export."""
