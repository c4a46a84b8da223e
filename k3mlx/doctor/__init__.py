"""`k3mlx doctor`: what stands in the way of a run on this machine, and what to do about it.

A check looks at facts that it is given and returns findings; the facts of this machine are looked up
separately, so that any other machine can be made up in a test. Nothing here changes the machine or the model.
"""
