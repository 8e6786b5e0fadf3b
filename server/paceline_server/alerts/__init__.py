"""Delivery of alerts from the outbox to webhooks, chat channels and Alertmanager."""
