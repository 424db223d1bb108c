"""The ``hosts`` scenario: containers as hosts, which are killed, paused and cut off. Run as the other scenarios are.

compose.yml      laid over docker-compose.yml: three queue servers, workers in two regions
installation.py  the project of Docker Compose, and what can happen to a container
scenario.py      which hosts are lost, the upgrade and the model change, and the verdict
"""
