"""Creq and Mreq of models without a profile: predicts how their kernels are launched, from published launches."""
