"""What training would take, before it runs: facts of machine, graph and model, and the search for a plan."""

from polyhop.plan.cluster import Cluster, read_cluster
from polyhop.plan.law import Law, fit_law
from polyhop.plan.machine import Link, Machine, load_machine, machine_file, save_machine
from polyhop.plan.plan import PLAN_FILE, Plan, Purpose, make_plan, read_plan
from polyhop.plan.prediction import Memory, Prediction
from polyhop.plan.search import NEEDS_PRICES, Limits, Ranked, duration, money, rank, size

__all__ = [
    "NEEDS_PRICES",
    "PLAN_FILE",
    "Cluster",
    "Law",
    "Limits",
    "Link",
    "Machine",
    "Memory",
    "Plan",
    "Prediction",
    "Purpose",
    "Ranked",
    "duration",
    "fit_law",
    "load_machine",
    "machine_file",
    "make_plan",
    "money",
    "rank",
    "read_cluster",
    "read_plan",
    "save_machine",
    "size",
]
