"""Outbox receivers: webhook and Alertmanager."""
