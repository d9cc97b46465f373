# SPDX-License-Identifier: Apache-2.0
"""Adapters for engines. Each imports its engine only when it is used."""
