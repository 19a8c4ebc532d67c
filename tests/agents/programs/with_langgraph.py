"""Buttons, played with LangGraph: a graph of a model and a tool node."""

import json
import sys

from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

task = json.load(sys.stdin)
pressed = ["nothing"]
model = ChatOpenAI(model="policy").bind_tools(task["tools"])


def ask(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def press(state: MessagesState) -> dict:
    answers = []
    for call in state["messages"][-1].tool_calls:
        pressed.append(str(call["args"].get("colour")))
        answers.append(ToolMessage(f"It is {pressed[-1]}.", tool_call_id=call["id"]))
    return {"messages": answers}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("press", press)
graph.add_edge(START, "ask")
graph.add_conditional_edges("ask", lambda state: "press" if state["messages"][-1].tool_calls else END)
graph.add_edge("press", "ask")
graph.compile().invoke({"messages": task["messages"]})
sys.stdout.write(pressed[-1])
