/* Filters above the claims ledger; without JavaScript the table stands as it is. */
document.addEventListener("DOMContentLoaded", () => {
  const table = document.querySelector("table.ledger");
  if (!table) return;
  const rows = [...table.tBodies[0].rows];
    const filters = [
    { name: "Chapter", of: (row) => row.cells[0].textContent.trim().split(".")[0] },
    {
      name: "Kind",
      of: (row) => row.cells[0].querySelector("em").textContent.trim(),
    },
    {
      name: "Verdict",
      of: (row) => row.cells[2].querySelector(".sd-badge").textContent.trim(),
    },
  ];
  const bar = document.createElement("form");
  bar.className = "ledger-filters";
  const count = document.createElement("output");

  const apply = () => {
    let shown = 0;
    for (const row of rows) {
      row.hidden = filters.some(
        (filter) => filter.select.value && filter.of(row) !== filter.select.value,
      );
      shown += !row.hidden;
    }
    count.textContent = `${shown} of ${rows.length} claims`;
  };

  for (const filter of filters) {
    const label = document.createElement("label");
    filter.select = document.createElement("select");
    const values = [...new Set(rows.map(filter.of))];
    for (const value of ["", ...values]) {
      filter.select.add(new Option(value || "all", value));
    }
    filter.select.addEventListener("change", apply);
    label.append(`${filter.name} `, filter.select);
    bar.append(label);
  }
  bar.append(count);
  const holder = table.closest(".pst-scrollable-table-container") || table;
  holder.before(bar);
  apply();
});
