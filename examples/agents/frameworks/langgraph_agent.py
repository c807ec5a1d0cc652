"""LangGraph (`pip install langgraph langchain-openai`): a graph of two nodes that asks, and asks whether it is sure."""

import json
import os

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

with open(os.environ["RLINF_VL_TASK"]) as file:
    task = json.load(file)
model = ChatOpenAI(model="policy", base_url=os.environ["OPENAI_BASE_URL"])


def ask(state: MessagesState) -> dict:
    return {"messages": [model.invoke(state["messages"])]}


def doubt(state: MessagesState) -> dict:
    return {"messages": [("user", "Are you sure?")]}


graph = StateGraph(MessagesState)
graph.add_node("ask", ask)
graph.add_node("doubt", doubt)
graph.add_node("again", ask)
graph.add_edge(START, "ask")
graph.add_edge("ask", "doubt")
graph.add_edge("doubt", "again")
graph.add_edge("again", END)
final = graph.compile().invoke({"messages": task["messages"]})
print(json.dumps({"answer": final["messages"][-1].content}))
