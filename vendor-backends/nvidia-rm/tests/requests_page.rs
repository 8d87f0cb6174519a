//! docs/cuda-requests.md is generated from the rows. `UPDATE_DOCS=1` writes it.

use std::fmt::Write;
use std::path::Path;

use nvidia_rm::table::{Policy, Row, Safe, UNNAMED};
use nvidia_rm::{classes, controls, escapes, uvm};

const PAGE: &str = "../../docs/cuda-requests.md";

const HEAD: &str = "\
# Requests of CUDA programs

What a vGPU does with each request that NVIDIA's libraries make of the driver's files
([cuda.md](cuda.md#the-front-end)). A request that is not listed is refused, counted, and logged
once. This page is generated from the rows in `vendor-backends/nvidia-rm`:

    UPDATE_DOCS=1 cargo test -p nvidia-rm --test requests_page

* **operation**: becomes an operation of the vGPU, with handles, addresses and sizes that its worker
  has made or checked.
* **vGPU**: answered with what the vGPU is or has.
* **driver**: a query that the GPU's driver answers, if its parameters have exactly the length of
  series 580. It changes nothing, and its parameters are numbers: neither pointers nor handles. A
  route to the graphics engine may not name a channel. Without a driver, or with another length, the
  answer is the recorded one, if there is one.
* **recording**: answered as a driver of series 580 answered on an H200.

Lengths are in bytes, of the newest series first. A dash means that a vGPU does not read the
parameters.
";

fn lengths<H>(row: &Row<H>) -> String {
    let lengths: Vec<_> = row
        .forms
        .iter()
        .map(|form| match form.since {
            0 => form.bytes.to_string(),
            since => format!("{} since {since}", form.bytes),
        })
        .collect();
    if lengths.is_empty() { "-".into() } else { lengths.join(", ") }
}

fn policy<H>(row: &Row<H>) -> String {
    let asked = match row.ask {
        None => "",
        Some(Safe::Numbers) => "driver",
        Some(Safe::Route) => "driver (no routes that name a channel)",
    };
    match (&row.policy, asked) {
        (Policy::Succeed(why), _) => format!("succeeds: {why}"),
        (Policy::Refuse(status, why), _) => format!("refused with status {status:#x}: {why}"),
        (Policy::Answer(_), "") => "vGPU".into(),
        (Policy::Answer(_), asked) => format!("vGPU, for the rest {asked}"),
        (Policy::Operate(_), _) => "operation".into(),
        (Policy::Query, "") => "recording".into(),
        (Policy::Query, asked) => asked.into(),
    }
}

fn table<H>(page: &mut String, title: &str, rows: &[Row<H>]) {
    let _ =
        write!(page, "\n## {title}\n\n| number | name | length | |\n| --- | --- | --- | --- |\n");
    for row in rows {
        let name =
            if row.name == UNNAMED { "not published".into() } else { format!("`{}`", row.name) };
        let (lengths, policy) = (lengths(row), policy(row));
        let _ = writeln!(page, "| {:#x} | {name} | {lengths} | {policy} |", row.number);
    }
}

#[test]
fn the_page_of_requests_is_that_of_the_rows() {
    let mut page = HEAD.to_owned();
    table(&mut page, "Ioctls of `/dev/nvidiactl` and `/dev/nvidiaN`", escapes::ROWS);
    table(&mut page, "Ioctls of `/dev/nvidia-uvm`", uvm::ROWS);
    table(&mut page, "Classes of objects", classes::ROWS);
    table(&mut page, "Controls of objects", controls::ROWS);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(written == page, "docs/cuda-requests.md is outdated: run the test with UPDATE_DOCS=1");
}
