//! Packs a recording of a CUDA program's requests for `tests/frontend`.
//!
//!     cargo run -p vendor-backends --example pack_requests UUID < RAW > PACKED
//!
//! A library that wraps `open`, `ioctl`, `mmap` and `close` of a program on a GPU with its driver
//! writes the raw form, one call a line, all numbers but descriptors, flags and `rc` of an ioctl in
//! hexadecimal:
//!
//!     open path=PATH flags=FLAGS rc=FD
//!     close file=FD
//!     mmap file=FD addr=A len=LEN prot=P flags=F offset=OFFSET rc=ADDRESS
//!     ioctl file=FD nr=NUMBER in arg=BYTES [params=BYTES] rc=RC out arg=BYTES [params=BYTES]
//!
//! FD has a letter behind it: C for nvidiactl, D for a GPU, U for nvidia-uvm. NUMBER is the
//! request of nvidia-uvm, or the lowest byte of another request. `params` are the bytes behind the
//! pointer of an allocation or a control.
//!
//! The packed form leaves zeros out, lists only the bytes that the driver changed, cuts off what
//! was recorded behind an argument of nvidia-uvm, and has another UUID. Its header describes it.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a tool for developers")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::BufRead;

use cuda_socket::calls::NodeKind;
use nvidia_rm::version::Layout;
use vendor_backends::nvidia::frontend::shapes;

/// UUID of the GPU in the packed form.
const UUID: &str = "00112233445566778899aabbccddeeff";

const HEADER: &str = "\
# Requests of a CUDA program to NVIDIA's driver 580.159.04 on an H200, packed by the example
# `pack_requests`, with another UUID.
#
# open FD NODE, close FD, map FD LEN OFFSET
# ioctl FD REQUEST: LEN BYTES -> CHANGES [; LEN BYTES -> CHANGES] [! ERROR]
#
# The parts are the argument, and what its pointer shows. BYTES are OFFSET=HEX, the rest being zeros.
# FD, LEN of parts and OFFSET in them are decimal, other numbers hexadecimal.
";

fn main() {
    let own = std::env::args().nth(1).unwrap().replace('-', "");
    let lengths: BTreeMap<u32, usize> = shapes(&Layout::of("580").unwrap())
        .iter()
        .filter(|shape| shape.node == NodeKind::Uvm)
        .filter_map(|shape| Some((shape.number, shape.argument_bytes? as usize)))
        .collect();
    print!("{HEADER}");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap().replace(&own, UUID);
        let words: Vec<_> = line.split(' ').collect();
        let value = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
        match words[0] {
            "open" => {
                let path = value("path=").unwrap();
                let Some(node) = path.strip_prefix("/dev/nvidia").filter(|node| node.len() < 5)
                else {
                    continue;
                };
                println!("open {} {node}", value("rc=").unwrap());
            }
            "close" => println!("close {}", fd(&words).0),
            "mmap" => {
                let (len, offset) = (value("len=").unwrap(), value("offset=").unwrap());
                println!("map {} {len} {offset}", fd(&words).0);
            }
            "ioctl" => println!("{}", ioctl(&words, &lengths)),
            _ => {}
        }
    }
}

/// Returns the descriptor of a line, and its letter.
fn fd<'a>(words: &[&'a str]) -> (&'a str, &'a str) {
    let file = words.iter().find_map(|word| word.strip_prefix("file=")).unwrap();
    file.split_at(file.len() - 1)
}

fn ioctl(words: &[&str], lengths: &BTreeMap<u32, usize>) -> String {
    let (fd, letter) = fd(words);
    let number = words.iter().find_map(|word| word.strip_prefix("nr=")).unwrap();
    let number = u32::from_str_radix(number, 16).unwrap();
    let parts = |name| {
        let found = words.iter().filter_map(move |word| word.strip_prefix(name)).map(bytes);
        found.collect::<Vec<_>>()
    };
    let mut arguments = parts("arg=");
    let request = if letter == "U" {
        for bytes in &mut arguments {
            bytes.resize(lengths[&number], 0);
        }
        number
    } else {
        0xc000_4600 | (arguments[0].len() as u32) << 16 | number
    };
    let mut text = format!("ioctl {fd} {request:x}:{}", part(&arguments[0], &arguments[1]));
    if let [before, after] = parts("params=").as_slice()
        && !before.is_empty()
    {
        write!(text, " ;{}", part(before, after)).unwrap();
    }
    let rc = words.iter().find_map(|word| word.strip_prefix("rc=")).unwrap();
    if rc != "0" {
        write!(text, " ! {rc}").unwrap();
    }
    text
}

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2).map(|pair| str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn part(before: &[u8], after: &[u8]) -> String {
    let zeros = vec![0; before.len()];
    let mut text = format!(" {}", before.len());
    text.push_str(&differences(&zeros, before));
    text.push_str(" ->");
    text.push_str(&differences(before, after));
    text
}

/// Returns where bytes differ, in pieces that are at least four bytes apart.
fn differences(from: &[u8], to: &[u8]) -> String {
    let differing: Vec<_> = (0..from.len()).filter(|at| from[*at] != to[*at]).collect();
    let mut text = String::new();
    let mut last = None;
    for at in differing {
        match last {
            Some(last) if at - last <= 4 => {
                (last + 1..=at).for_each(|at| write!(text, "{:02x}", to[at]).unwrap());
            }
            _ => write!(text, " {at}={:02x}", to[at]).unwrap(),
        }
        last = Some(at);
    }
    text
}
