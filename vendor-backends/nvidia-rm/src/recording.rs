//! Recorded answers to queries about the GPU.
//!
//! A query is a control without effect. What describes the vGPU is answered by `control` before,
//! and the driver of a GPU that has one answers next. [`Recorded`] has the answers of a real
//! driver, for GPUs without one.

use std::collections::BTreeMap;

use zerocopy::{FromBytes, IntoBytes};

use crate::abi::FsInfo;
use crate::bytes::{get_u32, put_u32};
use crate::controls;
use crate::numbers::status;

/// Recorded answer to one command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Answer {
    /// Length of the parameters at the recording, in bytes.
    len: usize,
    /// Bytes that the parameters must have, with their offset.
    key: Option<(usize, Vec<u8>)>,
    status: u32,
    /// Bytes that the driver wrote, by their offset.
    bytes: Vec<(usize, Vec<u8>)>,
}

/// Recorded answers.
#[derive(Debug, Default)]
pub struct Recorded {
    answers: BTreeMap<u32, Vec<Answer>>,
    /// Data by index, for commands with a list of both.
    lists: BTreeMap<u32, BTreeMap<u32, u32>>,
    /// Answers about parts that the GPU lacks: by kind of query and cluster.
    clusters: BTreeMap<(u16, u32), u32>,
}

/// A recording that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Line {0} of the recording is invalid")]
pub struct InvalidRecording(usize);

/// Commands with elements of another length in other series: command, length of the parameters
/// there, and the length of an element there and in the recording.
///
/// `NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER` has 256 elements of 24 bytes in series 550.
const RESIZED: &[(u32, usize, usize, usize)] = &[(controls::SM_ORDER, 6168, 24, 36)];

/// Number of elements in the arrays of [`RESIZED`].
const RESIZED_ELEMENTS: usize = 256;

impl Recorded {
    /// Returns the answers of a driver of series 580 for a Hopper GPU.
    pub fn hopper() -> Result<Self, InvalidRecording> {
        Self::parse(include_str!("recorded/hopper_580.txt"))
    }

    /// Reads a recording.
    pub fn parse(text: &str) -> Result<Self, InvalidRecording> {
        let mut recorded = Self::default();
        for (index, line) in text.lines().enumerate() {
            if !line.is_empty() && !line.starts_with('#') {
                recorded.add(line).ok_or(InvalidRecording(index + 1))?;
            }
        }
        Ok(recorded)
    }

    fn add(&mut self, line: &str) -> Option<()> {
        let (head, tail) = line.split_once(':')?;
        let hex = |text: &str| u32::from_str_radix(text, 16).ok();
        if let Some(command) = head.strip_prefix("list ") {
            let pair = |word: &str| {
                let (index, data) = word.split_once('=')?;
                Some((hex(index)?, hex(data)?))
            };
            let list = tail.split_whitespace().map(pair).collect::<Option<_>>()?;
            self.lists.insert(hex(command)?, list);
            return Some(());
        }
        if head == "clusters" {
            let triple = |word: &str| {
                let (key, data) = word.split_once('=')?;
                let (kind, cluster) = key.split_once('.')?;
                Some(((hex(kind)?.try_into().ok()?, hex(cluster)?), hex(data)?))
            };
            self.clusters = tail.split_whitespace().map(triple).collect::<Option<_>>()?;
            return Some(());
        }
        let mut words = head.split(' ');
        let command = hex(words.next()?)?;
        let mut answer = Answer { len: words.next()?.parse().ok()?, ..Default::default() };
        while let Some(word) = words.next() {
            match word {
                "key" => answer.key = Some(parse_bytes(words.next()?)?),
                "status" => answer.status = hex(words.next()?)?,
                _ => return None,
            }
        }
        answer.bytes = tail.split_whitespace().map(parse_bytes).collect::<Option<_>>()?;
        self.answers.entry(command).or_default().push(answer);
        Some(())
    }

    fn answer_list(&self, command: u32, params: &mut [u8]) -> Option<u32> {
        let list = self.lists.get(&command)?;
        let count = get_u32(params, 0)? as usize;
        for at in (0..count).map_while(|index| index.checked_mul(8)?.checked_add(4)) {
            let Some(index) = get_u32(params, at) else { break };
            put_u32(params, at + 4, list.get(&index).copied().unwrap_or(0));
        }
        Some(0)
    }
}

impl Recorded {
    /// Answers `NV2080_CTRL_CMD_GRMGR_GET_GR_FS_INFO`: a list of queries with a status each.
    fn answer_clusters(&self, params: &mut [u8]) -> Option<u32> {
        let (mut info, _) = FsInfo::read_from_prefix(params).ok()?;
        for query in info.queries.iter_mut().take(info.count.into()) {
            match self.clusters.get(&(query.kind, query.cluster)) {
                Some(data) => query.answer = *data,
                None => query.status = status::NOT_SUPPORTED,
            }
        }
        info.write_to_prefix(params).ok()?;
        Some(status::OK)
    }

    /// Answers a query in `params`. Returns the driver's status, or `None` for a command that was
    /// not recorded.
    pub fn query(&self, command: u32, params: &mut [u8]) -> Option<u32> {
        if command == controls::GR_FS_INFO {
            return self.answer_clusters(params);
        }
        if let Some(status) = self.answer_list(command, params) {
            return Some(status);
        }
        let has_key = |(at, bytes): &(usize, Vec<u8>)| {
            params.get(*at..).is_some_and(|params| params.starts_with(bytes))
        };
        let mut answers = self.answers.get(&command)?.iter();
        let answer = answers.find(|answer| answer.key.as_ref().is_none_or(has_key))?;
        let resized =
            RESIZED.iter().find(|(resized, len, ..)| (*resized, *len) == (command, params.len()));
        for (at, bytes) in &answer.bytes {
            for (offset, byte) in bytes.iter().enumerate().map(|(index, byte)| (at + index, byte)) {
                let offset = match resized {
                    Some((.., short, long)) => shortened(offset, *short, *long),
                    None => Some(offset),
                };
                // In other series, the end may be missing.
                if let Some(target) = offset.and_then(|offset| params.get_mut(offset)) {
                    *target = *byte;
                }
            }
        }
        Some(answer.status)
    }
}

/// Returns where a byte of an array with `long` elements is in one with `short` elements.
fn shortened(offset: usize, short: usize, long: usize) -> Option<usize> {
    let (element, within) = (offset / long, offset % long);
    if element >= RESIZED_ELEMENTS {
        return Some(RESIZED_ELEMENTS * short + offset - RESIZED_ELEMENTS * long);
    }
    (within < short).then_some(element * short + within)
}

fn parse_bytes(word: &str) -> Option<(usize, Vec<u8>)> {
    let (offset, bytes) = word.split_once('=')?;
    let pairs = bytes.as_bytes().chunks(2).map(|pair| {
        let text = str::from_utf8(pair).ok().filter(|text| text.len() == 2)?;
        u8::from_str_radix(text, 16).ok()
    });
    Some((offset.parse().ok()?, pairs.collect::<Option<_>>()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Policy, TESTED_SERIES, find};

    #[test]
    fn recorded_answers_change_what_the_driver_changed() {
        let recorded = Recorded::parse("00000123 8: 2=aabb\nlist 00000124: 7=9").unwrap();
        let mut params = [1; 8];
        assert_eq!(recorded.query(0x123, &mut params), Some(0));
        assert_eq!(params, [1, 1, 0xaa, 0xbb, 1, 1, 1, 1]);
        let mut list = [2, 0, 0, 0, 7, 0, 0, 0, 5, 5, 5, 5, 8, 0, 0, 0, 5, 5, 5, 5];
        assert_eq!(recorded.query(0x124, &mut list), Some(0));
        assert_eq!(list, [2, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(recorded.query(0x125, &mut params), None);
    }

    #[test]
    fn a_key_chooses_the_answer() {
        let text = "00000001 4 key 0=01: 1=02\n00000001 4 key 0=02 status 57:";
        let recorded = Recorded::parse(text).unwrap();
        let mut params = [1, 0, 0, 0];
        assert_eq!(recorded.query(1, &mut params), Some(0));
        assert_eq!(params, [1, 2, 0, 0]);
        assert_eq!(recorded.query(1, &mut [2, 0, 0, 0]), Some(0x57));
        assert_eq!(recorded.query(1, &mut [3, 0, 0, 0]), None);
    }

    #[test]
    fn the_recording_of_hopper_is_complete() {
        let recorded = Recorded::hopper().unwrap();
        let mut classes = [0; 804];
        assert_eq!(recorded.query(0x0080_0292, &mut classes), Some(0));
        let classes: Vec<_> = classes.chunks(4).map(|word| get_u32(word, 0).unwrap()).collect();
        assert!(classes.contains(&0xc86f) && classes.contains(&0xcbc0));
        for len in [9240, 6168] {
            let mut order = vec![0; len];
            assert_eq!(recorded.query(0x2080_121b, &mut order), Some(0));
            assert_eq!(get_u32(&order, len - 24).map(|n| n & 0xffff), Some(132), "{len}");
        }
    }

    #[test]
    fn recorded_commands_have_rows_with_their_lengths() {
        let recorded = Recorded::hopper().unwrap();
        for (command, answers) in &recorded.answers {
            let row = find(controls::ROWS, *command).unwrap_or_else(|| panic!("{command:#x}"));
            assert_eq!(row.policy, Policy::Query, "{command:#x}");
            let bytes = row.form(TESTED_SERIES).unwrap().bytes;
            assert!(answers.iter().all(|answer| answer.len == bytes), "{command:#x}");
        }
        for command in recorded.lists.keys() {
            assert!(find(controls::ROWS, *command).is_some(), "{command:#x}");
        }
    }

    #[test]
    fn an_invalid_recording_is_refused() {
        for line in ["1", "x 4:", "1:", "1 4: 0=a", "1 4 key:", "list 1: 2", "1 4 other 1:"] {
            assert!(Recorded::parse(line).is_err(), "{line}");
        }
    }
}
