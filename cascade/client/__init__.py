"""Clients of a served cascade; they need neither PyTorch nor Ray."""

from cascade.client.chat import ChatOptions, ToolCall, Turn, TurnPiece
from cascade.client.client import AsyncClient, Client, ServerInfo

__all__ = ["AsyncClient", "ChatOptions", "Client", "ServerInfo", "ToolCall", "Turn", "TurnPiece"]
