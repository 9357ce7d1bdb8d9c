"""What the texts contain, item by item, and the entries that judge each: nothing blank without a reason.

`ITEMS[section]` maps an item (a table, figure, listing, formula or blog section) to the ids of its entries, or to a
sentence that says why it has none. Statements in running text that belong to no item are listed by `coverage` itself.
"""

from verify.claims.inventory_b import ITEMS as LATER
from verify.claims.ledger import load

TABLES = tuple(f"Table 18-{n}" for n in range(1, 36))
FIGURES = tuple(f"Figure 18-{n}" for n in range(1, 34))
SUBSECTIONS = {"18.1": 3, "18.2": 4, "18.3": 4, "18.4": 5, "18.5": 3, "18.6": 4, "18.7": 4, "18.8": 4}
BLOG = ("1.1", "1.2", "2.1", "2.2", "2.3", "3.1", "3.2", "3.3", "3.4", "4.1", "4.2", "4.3", "5")

TITLES = {
    "18.1": ("Overview", "概述"),
    "18.2": ("Attention basics", "注意力基础"),
    "18.3": ("GPU I/O", "GPU I/O 瓶颈"),
    "18.4": ("FlashAttention v1", "FA v1 算法"),
    "18.5": ("FlashAttention v2", "FA v2 改进"),
    "18.6": ("FlashAttention v3", "FA v3 特性"),
    "18.7": ("Integration", "集成与实战"),
    "18.8": ("Extensions", "扩展与前瞻"),
    "blog": ("Companion blog", "数据流与工程验证"),
}

EARLY = {
    "18.1": {
        "Table 18-1": ("18.1-007", "18.1-009"),
        "Table 18-2": ("18.1-045", "18.1-050", "18.1-051", "18.1-052", "18.1-056"),
        "Figure 18-1": ("18.1-036",),
        "Figure 18-2": "a family tree of methods, without numbers; its statements are judged in the text entries",
        "18.1.1 Listing 1, standard attention": ("18.1-015", "18.1-057"),
        "18.1.1 Listing 2, HBM account": ("18.1-004",),
        "18.1.2 Listing 3, work of v1 and v2": ("18.1-021",),
        "18.1.2 Listing 4, producer and consumer warps": "a drawing without numbers; the pipeline is judged in 18.6.3",
        "18.1.3 Listing 1, linear attention": ("18.1-058",),
        "18.1.1 orders of cost": ("18.1-002",),
        "18.1.1 intensity": ("18.1-005",),
        "18.1.1 backward account": ("18.1-012", "18.1-013"),
        "18.1.3 window cost": ("18.1-040",),
        "18.1.3 Linformer": ("18.1-044", "18.1-045"),
        "18.1.3 Performer": ("18.1-046",),
        "18.1.3 kernel attention": ("18.1-047",),
        "18.1.3 cosFormer": ("18.1-048",),
    },
    "18.2": {
        "Table 18-3": ("18.2-014",),
        "Table 18-4": ("18.2-021", "18.2-042"),
        "Table 18-5": ("18.2-024", "18.2-025", "18.2-026"),
        "Table 18-6": ("18.2-044", "18.2-045"),
        "Figure 18-3": ("18.2-007",),
        "Figure 18-4": ("18.2-033",),
        "Figure 18-5": ("18.2-032",),
        "Figure 18-6": ("18.2-052",),
        "18.2.1 Listing 1, scaled dot-product attention": ("18.2-001", "18.2-017"),
        "18.2.2 Listing 2, QKV projection": ("18.2-034",),
        "18.2.2 Listing 3, causal mask": ("18.2-036", "18.2-037"),
        "18.2.2 Listing 4, sum of masks": ("18.2-015",),
        "18.2.3 Listing 1, FLOP estimator": ("18.2-038",),
        "18.2.4 Listing 1, softmax backward": ("18.2-053",),
        "18.2.4 Listing 2, attention backward": ("18.2-054",),
        "18.2.1 attention": ("18.2-001",),
        "18.2.1 variance": ("18.2-002", "18.2-003"),
        "18.2.1 softmax and its Jacobian": ("18.2-004", "18.2-005"),
        "18.2.2 multi-head": ("18.2-008",),
        "18.2.2 KV cache": ("18.2-009", "18.2-010"),
        "18.2.2 causal mask": ("18.2-013", "18.2-036"),
        "18.2.3 FLOPs": ("18.2-018", "18.2-019", "18.2-020", "18.2-016"),
        "18.2.4 softmax backward": ("18.2-005", "18.2-040"),
        "18.2.4 gradients": ("18.2-041",),
        "18.2.4 peak memory": ("18.2-045", "18.2-046"),
        "18.2.4 recomputation": ("18.2-047", "18.2-048", "18.2-049", "18.2-055"),
    },
    "18.3": {
        "Table 18-7": ("18.3-002", "18.3-003", "18.3-004"),
        "Table 18-8": ("18.3-017",),
        "Table 18-9": ("18.3-041",),
        "Table 18-10": ("18.3-043", "18.3-044", "18.3-045", "18.3-046"),
        "Figure 18-7": ("18.3-020",),
        "Figure 18-8": "the two roofs, without numbers; their crossing is judged in 18.3-022",
        "Figure 18-9": ("18.3-039",),
        "Figure 18-10": ("18.3-052",),
        "Figure 18-11": ("18.3-060",),
        "Figure 18-12": "boxes without numbers; the tile sizes meant are judged in 18.3-012 and 18.3-067",
        "18.3.1 Listing, three HBM generations": ("18.3-005",),
        "18.3.4 Listing 1, eager chain": ("18.3-060", "18.3-061", "18.3-063"),
        "18.3.1 SRAM constraint": ("18.3-012", "18.3-013"),
        "18.3.2 intensity of a product": ("18.3-022", "18.3-023"),
        "18.3.2 intensity of standard attention": ("18.3-024", "18.3-025", "18.3-026", "18.3-027"),
        "18.3.2 intensity of FlashAttention": ("18.3-031",),
        "18.3.2 I/O bound": ("18.3-032", "18.3-033"),
        "18.3.3 I/O of a product": ("18.3-040",),
        "18.3.3 total traffic": ("18.3-041", "18.3-036"),
        "18.3.3 Theta(N^2 d^2 / M)": ("18.3-042", "18.3-049"),
        "18.3.3 intensity against N": ("18.3-050", "18.3-051"),
    },
    "18.4": {
        "Table 18-11": ("18.4-005",),
        "Table 18-12": ("18.4-042",),
        "Table 18-13": ("18.4-060",),
        "Table 18-14": ("18.4-069", "18.4-070", "18.4-071", "18.4-072"),
        "Table 18-15": ("18.4-076",),
        "Table 18-16": ("18.4-077",),
        "Figure 18-13": ("18.4-003",),
        "Figure 18-14": ("18.4-003",),
        "Figure 18-15": ("18.4-019",),
        "Figure 18-16": ("18.4-028", "18.4-029"),
        "Figure 18-17": ("18.4-040",),
        "Figure 18-18": ("18.4-064",),
        "18.4.1 Listing 1, tiled forward": ("18.4-010",),
        "18.4.2 Listing 1, online accumulation": ("18.4-016",),
        "18.4.3 Listing 1, forward kernel": ("18.4-039", "18.4-030"),
        "18.4.4 Listing 1, backward kernel": ("18.4-046",),
        "18.4.1 tiles": ("18.4-001",),
        "18.4.1 sum over tiles": ("18.4-002",),
        "18.4.1 SRAM constraint": ("18.4-006", "18.4-007"),
        "18.4.2 safe softmax": ("18.4-011",),
        "18.4.2 online recurrence": ("18.4-013", "18.4-014", "18.4-015"),
        "18.4.3 output rescaling": ("18.4-037",),
        "18.4.3 read volume and advantage": ("18.4-033", "18.4-034"),
        "18.4.4 standard gradients": ("18.4-040",),
        "18.4.4 P from m and l": ("18.4-044",),
        "18.4.4 tile gradients": ("18.4-045",),
        "18.4.5 rounding of the rescaled sum": ("18.4-067",),
    },
}
ITEMS = EARLY | LATER


def coverage() -> dict[str, dict[str, tuple[str, ...] | str]]:
    """The whole table: items per section, then one row per subsection for the statements of its running text."""
    claims = load()
    table = {}
    for group in TITLES:
        rows = dict(ITEMS.get(group, {}))
        named = {id for ids in rows.values() if not isinstance(ids, str) for id in ids}
        rest = {}
        for id, claim in claims.items():
            if claim.group == group and id not in named:
                rest.setdefault(f"{claim.section} other statements", []).append(id)
        table[group] = rows | {name: tuple(ids) for name, ids in sorted(rest.items())}
    return table


def gaps() -> list[str]:
    """What is wrong with the table, in words; empty when nothing is left unexplained."""
    claims, table, found = load(), coverage(), []
    seen = {}
    for group, rows in table.items():
        for item, ids in rows.items():
            seen[item] = group
            if not ids:
                found.append(f"{group} {item}: neither an entry nor a reason")
            elif not isinstance(ids, str):
                found += [f"{group} {item}: no entry {id}" for id in ids if id not in claims]
    found += [f"{item}: not listed" for item in (*TABLES, *FIGURES) if item not in seen]
    for group, parts in SUBSECTIONS.items():
        sections = {claim.section for claim in claims.values()} | {item.split()[0] for item in seen}
        found += [f"{group}.{n}: nothing listed" for n in range(1, parts + 1) if f"{group}.{n}" not in sections]
    found += [f"blog {n}: not listed" for n in BLOG if not any(item.split()[0] == n for item in table["blog"])]
    for id, claim in claims.items():
        if claim.where.startswith(("Table", "Figure")) and id not in table[claim.group].get(claim.where, ()):
            found.append(f"{id} judges {claim.where}, which does not list it")
    return found
