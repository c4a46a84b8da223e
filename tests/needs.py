"""What a made-up model takes, for tests of plans: ten layers of which the first is wide, 900 experts of 17 MiB."""

from k3mlx.needs import DenseBytes, Needs

MB = 1 << 20
NEEDS = Needs(
    process=50 * MB,
    dense=DenseBytes((300 * MB, *[100 * MB] * 9), 80 * MB, (150 * MB, *[50 * MB] * 9)),
    ring=400 * MB,
    state=20 * MB,
    activations=lambda tokens: tokens * MB,
    scratch=lambda budget: 4 * MB,
    expert=17 * MB,
    padding=MB,
    experts=900,
    least=16,
)
