//! Recordings of the requests of CUDA programs, as the example `pack_requests` writes them.

use cuda_socket::Node;

/// One call of a program.
#[derive(Debug)]
pub enum Step {
    /// A device node was opened.
    Open(i32, Node),
    /// A descriptor was closed.
    Close(i32),
    /// Memory was mapped: descriptor, length and offset.
    Map(i32, u64, u64),
    /// An ioctl.
    Ioctl(Ioctl),
}

/// An ioctl with the driver's answer.
#[derive(Debug)]
pub struct Ioctl {
    /// Number of its line in the recording.
    pub line: usize,
    pub fd: i32,
    pub request: u32,
    pub failed: bool,
    /// The argument.
    pub argument: Part,
    /// What the argument points to.
    pub params: Part,
}

/// Bytes before and after an ioctl.
#[derive(Clone, Debug, Default)]
pub struct Part {
    pub before: Vec<u8>,
    pub after: Vec<u8>,
}

/// Reads a recording.
pub fn parse(text: &str) -> Vec<Step> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    lines.map(|(index, line)| step(index + 1, line).expect(line)).collect()
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

fn step(line: usize, text: &str) -> Option<Step> {
    let (what, rest) = text.split_once(' ')?;
    let mut words = rest.split(' ');
    let fd = words.next()?.parse().ok()?;
    Some(match what {
        "open" => Step::Open(
            fd,
            match words.next()? {
                "ctl" => Node::Control,
                "-uvm" => Node::Uvm,
                minor => Node::Gpu(minor.parse().ok()?),
            },
        ),
        "close" => Step::Close(fd),
        "map" => Step::Map(fd, hex(words.next()?)?, hex(words.next()?)?),
        _ => {
            let (head, tail) = rest.split_once(':')?;
            let (tail, failed) =
                tail.split_once(" !").map_or((tail, false), |(tail, _)| (tail, true));
            let (argument, params) = tail.split_once(" ;").unwrap_or((tail, ""));
            Step::Ioctl(Ioctl {
                line,
                fd,
                request: hex(head.split_once(' ')?.1)?.try_into().ok()?,
                failed,
                argument: part(argument)?,
                params: if params.is_empty() { Part::default() } else { part(params)? },
            })
        }
    })
}

fn part(text: &str) -> Option<Part> {
    let (before, changes) = text.trim().split_once("->")?;
    let (len, bytes) = before.split_once(' ')?;
    let mut before = vec![0; len.parse().ok()?];
    apply(&mut before, bytes)?;
    let mut after = before.clone();
    apply(&mut after, changes)?;
    Some(Part { before, after })
}

fn apply(target: &mut [u8], changes: &str) -> Option<()> {
    for change in changes.split_whitespace() {
        let (at, bytes) = change.split_once('=')?;
        let at: usize = at.parse().ok()?;
        for (index, pair) in bytes.as_bytes().chunks(2).enumerate() {
            *target.get_mut(at + index)? = hex(str::from_utf8(pair).ok()?)?.try_into().ok()?;
        }
    }
    Some(())
}
