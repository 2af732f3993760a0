"""Stages that measure."""
