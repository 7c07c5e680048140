"""`python -m ssl_vit` and `accelerate launch -m ssl_vit`."""

from ssl_vit.cli import main

main()
