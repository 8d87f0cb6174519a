//! `scheduler`: settings and decisions of the schedulers.

use std::fmt::Write as _;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hyper::Method;
use serde::Serialize;
use vgpud_api::{Decided, ModifyScheduler, Scheduler, SchedulerDecision, Vgpu};

use super::read::{called, no_parent};
use crate::cli::{Output, Scheduler as Args, Switch};
use crate::failure::Failure;
use crate::mdevctl::pretty;
use vgpud_client::Client;

/// Log of a parent's scheduler.
#[derive(Debug, Serialize)]
struct Log {
    parent: String,
    decisions: Vec<SchedulerDecision>,
}

/// Runs `scheduler`.
pub async fn scheduler(client: &Client, args: Args) -> Result<Vec<u8>, Failure> {
    let mut all: Vec<Scheduler> = client.get("/v1/schedulers").await?;
    if let Some(parent) = &args.parent {
        let names: Vec<_> = all.iter().map(|scheduler| scheduler.parent.clone()).collect();
        all.retain(|scheduler| scheduler.parent == *parent);
        if all.is_empty() {
            return Err(no_parent(parent, &names));
        }
    }
    if args.log {
        return log(client, &all, args.output).await;
    }
    let change = change(&args);
    if change != ModifyScheduler::default() {
        let [only] = all.as_slice() else {
            let names: Vec<_> = all.iter().map(|scheduler| scheduler.parent.as_str()).collect();
            let message =
                format!("There are several parents; name one with -p: {}", names.join(", "));
            return Err(Failure::Usage(message));
        };
        let path = format!("/v1/schedulers/{}", only.parent);
        client.request(Method::PATCH, &path, &change).await?;
        return Ok(Vec::new());
    }
    match args.output {
        Output::Json => pretty(&all),
        Output::Text => Ok(all.iter().map(text).collect::<String>().into_bytes()),
    }
}

/// Returns the requested changes.
fn change(args: &Args) -> ModifyScheduler {
    ModifyScheduler {
        policy: args.policy.clone(),
        timeslice_us: args.timeslice,
        period_us: args.period,
        averaging: args.timeslice.map(|_| false),
        averaging_factor: args.averaging_factor,
        frequency: args.frequency,
        overcommit: args.overcommit.map(|switch| switch == Switch::On),
    }
}

/// Formats a scheduler's settings.
fn text(scheduler: &Scheduler) -> String {
    let ms = |us: u64| us as f64 / 1e3;
    let mut text = format!("{}\n  Policy: {}\n", scheduler.parent, scheduler.policy);
    let slice = if scheduler.averaging {
        format!(
            "{:.3} ms (averaging: frequency {} Hz, factor {})",
            ms(scheduler.timeslice_us),
            scheduler.frequency,
            scheduler.averaging_factor
        )
    } else {
        format!("{} ms", ms(scheduler.timeslice_us))
    };
    let _ = writeln!(text, "  Time slice: {slice}");
    let _ = writeln!(text, "  Period of caps: {} ms", ms(scheduler.period_us));
    let _ = writeln!(text, "  Asked for: {} of 100, {} left", scheduler.asked, scheduler.left);
    let _ = writeln!(text, "  Overcommit: {}", if scheduler.overcommit { "on" } else { "off" });
    text
}

async fn log(client: &Client, all: &[Scheduler], output: Output) -> Result<Vec<u8>, Failure> {
    let mut logs = Vec::new();
    for scheduler in all {
        let path = format!("/v1/schedulers/{}/log", scheduler.parent);
        logs.push(Log { parent: scheduler.parent.clone(), decisions: client.get(&path).await? });
    }
    match output {
        Output::Json => pretty(&logs),
        Output::Text => {
            let vgpus: Vec<Vgpu> = client.get("/v1/vgpus").await?;
            Ok(log_text(&logs, &vgpus).into_bytes())
        }
    }
}

fn log_text(logs: &[Log], vgpus: &[Vgpu]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(["AGO", "PARENT", "VGPU", "DECIDED", "WHY", "ENGINE", "WAITED", "OWED"]);
    for log in logs {
        for decision in &log.decisions {
            table.add_row([
                format!("{:.3} s", decision.age_ms as f64 / 1e3),
                log.parent.clone(),
                called(decision.vgpu, vgpus),
                decided(decision.decision),
                decision.cause.clone(),
                format!("{:.3} s", decision.engine_ns as f64 / 1e9),
                format!("{:.3} s", decision.wait_ns as f64 / 1e9),
                format!("{:.2} ms", decision.owed_ns as f64 / 1e6),
            ]);
        }
    }
    for column in [0, 5, 6, 7] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

fn decided(decided: Decided) -> String {
    let ms = |us: u64| us as f64 / 1e3;
    match decided {
        Decided::Timeslice { timeslice_us } => format!("slice {} ms", ms(timeslice_us)),
        Decided::Cap { time_us, period_us } => {
            format!("cap {} of {} ms", ms(time_us), ms(period_us))
        }
        Decided::NoCap => "no cap".to_owned(),
        Decided::Gate { open: true } => "gate open".to_owned(),
        Decided::Gate { open: false } => "gate closed".to_owned(),
    }
}
