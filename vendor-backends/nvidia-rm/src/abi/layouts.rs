//! Comparison with the headers of NVIDIA's driver: `headers/layouts.txt` and `headers/numbers.txt`,
//! which `headers/generate.py` writes.

use std::collections::{BTreeMap, BTreeSet};

use super::{alloc, control, ioctl, map_dma, uvm};
use crate::table::{Form, Row, Safe, UNNAMED, find};
use crate::version::Layout;
use crate::{classes, controls, escapes, numbers, uvm as uvm_rows};

/// Name, size, and fields with their offsets.
pub type Structure = (&'static str, usize, &'static [(&'static str, usize)]);

const LAYOUTS: &str = include_str!("../../headers/layouts.txt");
const NUMBERS: &str = include_str!("../../headers/numbers.txt");

/// Structures without a name in the headers.
const UNPUBLISHED: &[&str] = &["CardInfos"];

/// Fields that are the driver's own, or whose name is that of something else there.
fn is_compared(field: &str) -> bool {
    !field.starts_with("pad") && !["reserved", "rest"].contains(&field)
}

fn structures() -> impl Iterator<Item = &'static Structure> {
    let lists = [
        alloc::STRUCTURES,
        control::STRUCTURES,
        ioctl::STRUCTURES,
        map_dma::STRUCTURES,
        uvm::STRUCTURES,
    ];
    lists.into_iter().flatten()
}

/// Line of a table: what it is about, the series for which it holds, and values.
struct Line {
    key: [&'static str; 2],
    series: Vec<u16>,
    values: Vec<&'static str>,
}

/// Returns the lines of a table for the newest release of each series.
fn lines(table: &'static str) -> impl Iterator<Item = Line> {
    let releases = table.lines().filter_map(|line| line.strip_prefix("# "));
    let newest: BTreeSet<_> = releases.filter_map(|line| line.split(' ').next_back()).collect();
    table.lines().filter(|line| !line.starts_with('#')).map(move |line| {
        let (key, rest) = line.split_once(" [").unwrap();
        let (series, values) = rest.split_once(']').unwrap();
        let (name, about) = key.split_once(' ').unwrap();
        // A whole series, or some of its releases.
        let is_newest = |part: &&str| {
            !part.contains('.') || part.split(',').any(|release| newest.contains(release))
        };
        let series = series.split(' ').filter(is_newest);
        let series = series.map(|part| part.split('.').next().unwrap().parse().unwrap());
        Line {
            key: [name, about],
            series: series.collect(),
            values: values.split_whitespace().collect(),
        }
    })
}

fn layout(series: u16) -> Layout {
    Layout::of_programs(&format!("{series}.1")).unwrap()
}

/// Returns the length of the form that a row has in a series.
fn row_bytes<H>(rows: &'static [Row<H>], number: u32, layout: &Layout) -> usize {
    find(rows, number).unwrap().form(layout.series).unwrap().bytes
}

/// Returns the size of a structure in a series, or `None` if programs of the series do not use it.
fn size_in(structure: &Structure, c_name: &str, layout: &Layout) -> Option<usize> {
    let (name, bytes, _) = *structure;
    let if_form = |form: usize| (form == bytes).then_some(bytes);
    match (name, c_name) {
        ("MapDma" | "MapDma570", _) => if_form(layout.map_dma),
        (_, "UVM_FREE_PARAMS") => if_form(row_bytes(uvm_rows::ROWS, uvm_rows::FREE, layout)),
        ("UnregisterChannel" | "UnregisterChannel590", _) => {
            if_form(row_bytes(uvm_rows::ROWS, uvm_rows::UNREGISTER_CHANNEL, layout))
        }
        ("FbInfo", _) => Some(row_bytes(controls::ROWS, controls::FB_INFO, layout)),
        ("NameString", _) => Some(row_bytes(controls::ROWS, controls::NAME_STRING, layout)),
        ("VaSpaceParams", _) => Some(layout.va_space),
        ("ChannelParams", _) => Some(layout.channel),
        // Only the host asks for utilization.
        ("EngineUtilization" | "UtilizationSample" | "UtilizationSamples", _)
            if layout.series == 550 =>
        {
            None
        }
        _ => Some(bytes),
    }
}

#[test]
fn structures_are_those_of_the_published_headers() {
    let mut compared = BTreeSet::new();
    for Line { key: [name, c_name], series, values } in lines(LAYOUTS) {
        if name == "StatusPage" {
            continue;
        }
        let structure = structures().find(|structure| structure.0 == name);
        let structure = structure.unwrap_or_else(|| panic!("{name}"));
        let fields: BTreeMap<_, _> = structure.2.iter().copied().collect();
        for series in series {
            let Some(bytes) = size_in(structure, c_name, &layout(series)) else { continue };
            assert_eq!(values[0].parse(), Ok(bytes), "{c_name} in series {series}");
            for value in &values[1..] {
                let (field, at) = value.split_once('=').unwrap();
                let ours = fields.get(field).copied();
                assert_eq!(at.parse().ok(), ours, "{c_name}, {field} in series {series}");
                compared.insert((name, field));
            }
        }
    }
    for (name, _, fields) in structures().filter(|structure| !UNPUBLISHED.contains(&structure.0)) {
        for (field, _) in fields.iter().filter(|(field, _)| is_compared(field)) {
            assert!(compared.contains(&(*name, *field)), "{name}.{field} is not compared");
        }
    }
}

#[test]
fn the_page_with_the_state_has_the_published_offsets() {
    for Line { key: [name, _], series, values } in lines(LAYOUTS) {
        for series in series.into_iter().filter(|_| name == "StatusPage") {
            let (at, len) = layout(series).utilization();
            let numbers = at as usize + size_of::<u64>();
            let ours = [
                format!("utilization={at}"),
                format!("percent={numbers}"),
                format!("memory_percent={}", numbers + len),
            ];
            assert_eq!(values[1..], ours, "series {series}");
        }
    }
}

fn symbols<H>(rows: &'static [Row<H>]) -> Vec<(u32, &'static str)> {
    let named = rows.iter().filter(|row| row.name != UNNAMED);
    named.map(|row| (row.number, row.name)).collect()
}

#[test]
fn numbers_are_those_of_the_published_headers() {
    let published: BTreeMap<_, _> = lines(NUMBERS)
        .filter(|line| line.key[0] == "number")
        .map(|Line { key: [_, name], values, .. }| {
            (name, u32::from_str_radix(values[0].trim_start_matches("0x"), 16).unwrap())
        })
        .collect();
    let own = [
        numbers::class::NUMBERS,
        numbers::control::NUMBERS,
        numbers::fb::NUMBERS,
        numbers::status::NUMBERS,
    ];
    let rows = [
        symbols(escapes::ROWS),
        symbols(uvm_rows::ROWS),
        symbols(classes::ROWS),
        symbols(controls::ROWS),
        own.concat(),
    ];
    for (number, name) in rows.concat() {
        assert_eq!(published.get(name), Some(&number), "{name}");
    }
}

#[test]
fn parameters_of_controls_have_the_published_sizes() {
    for Line { key: [kind, name], series, values } in lines(NUMBERS) {
        let row = controls::ROWS.iter().find(|row| row.name == name);
        let Some(row) = row.filter(|row| kind != "number" && !row.forms.is_empty()) else {
            continue;
        };
        for series in series {
            let Form { bytes, route, .. } = *row.form(series).unwrap();
            let ours = if kind == "params" { Some(bytes) } else { route };
            // Structures with a route that the front end does not look at.
            if kind == "params" || ours.is_some() {
                assert_eq!(values[0].parse().ok(), ours, "{kind} of {name} in series {series}");
            }
        }
    }
}

#[test]
fn rows_have_one_number_each_and_forms_as_the_layouts_say() {
    fn check<H>(rows: &[Row<H>]) {
        let numbers: BTreeSet<_> = rows.iter().map(|row| row.number).collect();
        assert_eq!(numbers.len(), rows.len());
        for row in rows {
            let newest_first = row.forms.is_sorted_by_key(|form| std::cmp::Reverse(form.since));
            assert!(newest_first, "{}", row.name);
        }
    }
    check(escapes::ROWS);
    check(uvm_rows::ROWS);
    check(classes::ROWS);
    check(controls::ROWS);
    for layout in Layout::supported() {
        assert_eq!(row_bytes(classes::ROWS, classes::VA_SPACE, layout), layout.va_space);
        assert_eq!(row_bytes(classes::ROWS, classes::HOPPER_CHANNEL, layout), layout.channel);
    }
}

#[test]
fn only_queries_that_are_safe_reach_the_driver() {
    for row in controls::ROWS {
        let routed = row.forms.iter().any(|form| form.route.is_some());
        assert_eq!(row.ask == Some(Safe::Route), routed, "{}", row.name);
        assert!(row.ask.is_none() || row.asked().is_some(), "{}", row.name);
        // Their objects are made by the worker.
        let object = row.number >> 16;
        assert!(row.ask.is_none() || [0, 0x80, 0x2080].contains(&object), "{}", row.name);
    }
}
