"""Plain torch implementations: any device, fp16 to fp64, differentiated by autograd.

They are the oracle of every test and what runs where Triton does not.
"""
