//! Text and files that a less trusted process chooses: a guest, a user of a vGPU, another host.
//!
//! * [`one_line`] makes such text harmless on a terminal and in a log; [`message`] is that for a
//!   message, which may quote any amount of such text; [`escaped`] makes a name
//!   that ends where its quotation marks are
//! * [`read_start`] reads such a file, and files of `/proc` and `/sys`, up to a limit;
//!   [`read_end`] reads the end; [`read_whole`] and [`read_text`] refuse a file beyond the limit;
//!   [`any_line`] looks through a table of any length
//! * [`Aside`] reads what may never be there, such as a process's command line

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Limit for a file with one value or one name, in bytes: `comm`, `vendor`, a process ID.
pub const VALUE: usize = 4 << 10;
/// Limit for a file with a short table, in bytes: `/proc/PID/status`, `limits`, settings.
pub const TABLE: usize = 1 << 20;
/// Longest message, in characters.
const MAX_MESSAGE: usize = 500;
/// Limit for a line of a table of the kernel, in bytes. A mount has two paths, which are escaped.
const LINE: usize = 64 << 10;

/// Returns the first `max` bytes of a file.
///
/// A process chooses the length of its command line without needing the memory for it, so that a
/// reader without a limit can be made to allocate any amount.
///
/// # Errors
///
/// Fails if the file cannot be read. Pipes and devices are refused: a read of one may never end.
pub fn read_start(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the last `max` bytes of a file, such as a log.
///
/// # Errors
///
/// Fails as [`read_start`] does.
pub fn read_end(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let mut file = open(path)?;
    let before = file.metadata()?.len().saturating_sub(max as u64);
    file.seek(SeekFrom::Start(before))?;
    let mut bytes = Vec::new();
    file.take(max as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns a file of at most `max` bytes.
///
/// # Errors
///
/// Fails as [`read_start`] does, and if the file is longer.
pub fn read_whole(path: &Path, max: usize) -> io::Result<Vec<u8>> {
    let bytes = read_start(path, max.saturating_add(1))?;
    if bytes.len() > max {
        let message = format!("longer than {max} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Returns a file of at most `max` bytes as text. Bytes that are not UTF-8 are replaced.
///
/// # Errors
///
/// Fails as [`read_whole`] does.
pub fn read_text(path: &Path, max: usize) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&read_whole(path, max)?).into_owned())
}

/// Returns whether a line of a file has a property. The file may have any length, and of each line
/// the first 64 KiB count.
///
/// # Errors
///
/// Fails as [`read_start`] does.
pub fn any_line(path: &Path, mut has: impl FnMut(&str) -> bool) -> io::Result<bool> {
    let mut reader = BufReader::new(open(path)?);
    let mut line = Vec::new();
    let mut is_begin = true;
    loop {
        line.clear();
        if reader.by_ref().take(LINE as u64).read_until(b'\n', &mut line)? == 0 {
            return Ok(false);
        }
        let is_end = line.pop_if(|last| *last == b'\n').is_some();
        if is_begin && has(&String::from_utf8_lossy(&line)) {
            return Ok(true);
        }
        is_begin = is_end;
    }
}

/// Threads for reads that may wait for ever, up to a number.
///
/// The kernel reads a process's command line, environment and maps with a lock of its memory. A
/// process holds that lock for as long as it likes where it maps a file of a file system in user
/// space (FUSE) whose server does not answer.
#[derive(Debug)]
pub struct Aside {
    waiting: Arc<AtomicUsize>,
    max: usize,
}

impl Aside {
    /// Creates room for `max` threads at a time.
    #[must_use]
    pub fn new(max: usize) -> Self {
        Self { waiting: Arc::default(), max }
    }

    /// Runs `read` on a thread of its own, and does not wait for it. Returns false if it does not
    /// run: as many threads wait already, or there are no more.
    pub fn run(&self, read: impl FnOnce() + Send + 'static) -> bool {
        /// A thread's place, which ends with the thread.
        struct Place(Arc<AtomicUsize>);
        impl Drop for Place {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        let is_free = |waiting: usize| (waiting < self.max).then_some(waiting + 1);
        if self.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_free).is_err() {
            return false;
        }
        let place = Place(Arc::clone(&self.waiting));
        let thread = thread::Builder::new().name("aside".into());
        let body = move || {
            let _place = place;
            read();
        };
        thread.spawn(body).is_ok()
    }
}

/// Opens a regular file without waiting for the other end of a pipe.
fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a file"));
    }
    Ok(file)
}

/// Returns a text as one line of at most `max` characters. What is not visible, moves the cursor or
/// changes the direction of the text is escaped.
#[must_use]
pub fn one_line(text: &str, max: usize) -> String {
    let mut line = String::with_capacity(text.len().min(max));
    for (index, character) in text.chars().enumerate() {
        if index == max {
            line.push('…');
            break;
        }
        if is_shown(character) {
            line.push(character);
        } else {
            line.extend(character.escape_default());
        }
    }
    line
}

/// Returns a message as [`one_line`] does, up to 500 characters and with runs of spaces as one:
/// they could fill lines of a terminal, so that what follows looks like another program's message.
#[must_use]
pub fn message(text: &str) -> String {
    let mut before = '\0';
    let spaced = text
        .chars()
        .filter(|character| std::mem::replace(&mut before, *character) != ' ' || *character != ' ');
    one_line(&spaced.take(MAX_MESSAGE + 1).collect::<String>(), MAX_MESSAGE)
}

/// Returns a name as [`one_line`] does, for a place between quotation marks: those in the name are
/// escaped, so that the words after it are not the name's.
#[must_use]
pub fn escaped(name: &str, max: usize) -> String {
    one_line(&name.replace('\\', "\\\\").replace('"', "\\\""), max)
}

/// Returns whether [`one_line`] would change a text that is short enough.
#[must_use]
pub fn has_control(text: &str) -> bool {
    !text.chars().all(is_shown)
}

/// Returns whether a character is shown, and does nothing else.
///
/// Control characters move the cursor, others end the line or change the direction of the text.
/// Characters that are not visible make a text look like another one, and can hide a third.
fn is_shown(character: char) -> bool {
    matches!(character, ' '..='~')
        || (!character.is_ascii() && is_printable(character) && !is_invisible(character))
}

/// Returns whether a character beyond ASCII is printable by the standard library's tables of
/// Unicode. Format and control characters, separators, private use and what Unicode has not
/// assigned are not.
fn is_printable(character: char) -> bool {
    // A mark is shown with the letter before it.
    let mut text = [b'x', 0, 0, 0, 0];
    let len = 1 + character.encode_utf8(&mut text[1..]).len();
    str::from_utf8(&text[..len]).is_ok_and(|text| text.escape_debug().eq(text.chars()))
}

/// Returns whether a letter or a mark is not visible: one that fills a Hangul syllable, or selects
/// a form of the letter before it. Unicode's property `Default_Ignorable_Code_Point` consists of
/// these and of characters that are not printable.
fn is_invisible(character: char) -> bool {
    matches!(character,
        '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}' | '\u{e0100}'..='\u{e01ef}')
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::ops::RangeInclusive;
    use std::process::{Command, Stdio};

    use proptest::prelude::*;

    use super::*;

    /// Unicode's property `Default_Ignorable_Code_Point`, and what else must not reach a terminal:
    /// control characters, separators, annotations, private use, and what is no character.
    const NOT_SHOWN: [RangeInclusive<char>; 23] = [
        '\0'..='\u{1f}',
        '\u{7f}'..='\u{a0}',
        '\u{ad}'..='\u{ad}',
        '\u{34f}'..='\u{34f}',
        '\u{61c}'..='\u{61c}',
        '\u{115f}'..='\u{1160}',
        '\u{17b4}'..='\u{17b5}',
        '\u{180b}'..='\u{180f}',
        '\u{200b}'..='\u{200f}',
        '\u{2028}'..='\u{202e}',
        '\u{2060}'..='\u{206f}',
        '\u{3164}'..='\u{3164}',
        '\u{e000}'..='\u{f8ff}',
        '\u{fe00}'..='\u{fe0f}',
        '\u{feff}'..='\u{feff}',
        '\u{ffa0}'..='\u{ffa0}',
        '\u{fff0}'..='\u{fffb}',
        '\u{fffe}'..='\u{ffff}',
        '\u{110bd}'..='\u{110bd}',
        '\u{1bca0}'..='\u{1bca3}',
        '\u{1d173}'..='\u{1d17a}',
        '\u{e0000}'..='\u{e0fff}',
        '\u{f0000}'..='\u{10ffff}',
    ];

    fn not_shown() -> impl Iterator<Item = char> {
        NOT_SHOWN.into_iter().flatten()
    }

    #[test]
    fn characters_that_are_not_visible_are_escaped() {
        for character in not_shown() {
            let line = one_line(&format!("a{character}b"), 100);
            assert!(line.is_ascii() && line.len() > 3, "{line}");
        }
    }

    proptest! {
        #[test]
        fn a_line_has_what_is_visible_only(
            parts in prop::collection::vec(prop_oneof![
                any::<String>(),
                prop::sample::select(not_shown().collect::<Vec<_>>()).prop_map(String::from),
            ], 0..8),
            max in 0..40_usize,
        ) {
            let text = parts.concat();
            let line = one_line(&text, usize::MAX);
            let is_shown = |c| !NOT_SHOWN.iter().any(|range| range.contains(&c));
            prop_assert!(line.chars().all(is_shown), "{line:?}");
            prop_assert_eq!(has_control(&text), line != text);
            prop_assert_eq!(&one_line(&line, usize::MAX), &line, "escaped once more");
            let kept: String = text.chars().take(max).collect();
            let rest = if text == kept { "" } else { "…" };
            prop_assert_eq!(one_line(&text, max), one_line(&kept, max) + rest);
        }
    }

    #[test]
    fn control_characters_are_shown_and_length_is_bounded() {
        for (text, line) in [
            ("plain text, grüße", "plain text, grüße"),
            ("\u{1b}[2Ja\nb\tc\u{9b}", "\\u{1b}[2Ja\\nb\\tc\\u{9b}"),
            ("a\u{202e}b\u{2028}\u{61c}", "a\\u{202e}b\\u{2028}\\u{61c}"),
            ("ad\u{200b}min\u{feff}", "ad\\u{200b}min\\u{feff}"),
            ("vm1\u{e0041}\u{fe0f}", "vm1\\u{e0041}\\u{fe0f}"),
            // Quotes, and marks that combine with letters, as in Hindi and in what Macs write.
            ("it's \"a\\b\"", "it's \"a\\b\""),
            ("not UTF-8: \u{fffd}", "not UTF-8: \u{fffd}"),
            ("gru\u{308}ße, हिन्दी, ไม่, 東京 🙂", "gru\u{308}ße, हिन्दी, ไม่, 東京 🙂"),
        ] {
            assert_eq!(one_line(text, 100), line);
            assert_eq!(has_control(text), text != line);
        }
        assert_eq!(one_line("abcdef", 3), "abc…");
        assert_eq!(one_line("abc", 3), "abc");
    }

    #[test]
    fn a_message_is_short_and_has_no_runs_of_spaces() {
        assert_eq!(message("plain text,\tgrüße"), "plain text,\\tgrüße");
        let forged = format!("x{}vgpud: \u{3000}\u{a0}y  ", " ".repeat(200));
        assert_eq!(message(&forged), r"x vgpud: \u{3000}\u{a0}y ");
        assert_eq!(message(&"a ".repeat(1 << 20)), "a ".repeat(MAX_MESSAGE / 2) + "…");
        assert_eq!(message(&"é".repeat(MAX_MESSAGE)), "é".repeat(MAX_MESSAGE));
    }

    #[test]
    fn a_name_does_not_end_its_quotation() {
        assert_eq!(escaped("x\") of user root", 100), "x\\\") of user root");
        assert_eq!(escaped("x\\\"\n", 100), "x\\\\\\\"\\n");
        assert_eq!(escaped("web 1", 3), "web…");
    }

    #[test]
    fn a_file_is_read_up_to_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, b"ab\xffd").unwrap();
        assert_eq!(read_start(&path, 3).unwrap(), b"ab\xff");
        assert_eq!(read_start(&path, usize::MAX).unwrap(), b"ab\xffd");
        assert_eq!(read_end(&path, 2).unwrap(), b"\xffd");
        assert_eq!(read_end(&path, 9).unwrap(), b"ab\xffd");
        assert_eq!(read_whole(&path, 4).unwrap(), b"ab\xffd");
        assert_eq!(read_text(&path, 4).unwrap(), "ab\u{fffd}d");
        assert_eq!(read_whole(&path, 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
        // A file without end.
        assert_eq!(read_start(Path::new("/dev/zero"), 9).unwrap_err().to_string(), "not a file");
    }

    #[test]
    fn a_pipe_is_refused_without_waiting_for_its_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        assert_eq!(read_start(&path, 9).unwrap_err().to_string(), "not a file");
    }

    #[test]
    fn a_long_command_line_of_a_process_is_cut() {
        let argument = "x".repeat(100 << 10);
        let mut child = Command::new("sh");
        child.args(["-c", "echo; read x"]).args(std::iter::repeat_n(&argument, 9));
        let mut child = child.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        // The kernel shows the arguments once the program runs.
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let path = format!("/proc/{}/cmdline", child.id());
        let start = read_start(Path::new(&path), VALUE);
        let whole = read_whole(Path::new(&path), TABLE / 2);
        child.kill().unwrap();
        child.wait().unwrap();
        let start = start.unwrap();
        assert!(
            start.len() == VALUE && start.starts_with(b"sh\0-c\0echo; read x\0xxx"),
            "{}",
            start.len()
        );
        assert_eq!(whole.unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn lines_are_cut_and_the_rest_of_a_line_is_no_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let long = "x".repeat(LINE);
        fs::write(&path, format!("first\n{long}forged\nlast")).unwrap();
        let mut lines = Vec::new();
        let found = any_line(&path, |line| {
            lines.push(line.to_owned());
            line == "forged"
        });
        assert!(!found.unwrap());
        assert_eq!(lines, ["first", &long, "last"]);
        assert!(any_line(&path, |line| line == "last").unwrap());
    }

    #[test]
    fn reads_that_wait_for_ever_take_a_bounded_number_of_threads() {
        let aside = Aside::new(2);
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let stopped = Arc::new(std::sync::Mutex::new(stopped));
        let wait = || {
            let stopped = Arc::clone(&stopped);
            move || assert!(stopped.lock().unwrap().recv().is_err())
        };
        assert!(aside.run(wait()) && aside.run(wait()));
        assert!(!aside.run(|| {}), "two wait");
        drop(stop);
        while !aside.run(|| {}) {
            thread::yield_now();
        }
    }
}
