//! Messages in the source code, recognized by the code before them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Code before a string literal that makes the literal a message.
const MARKS: [&str; 16] = [
    "#[error(",
    "ErrorDetail::new(",
    "error(ErrorCode",
    "error(",
    "Failure::",
    "let what =",
    "let message =",
    "bail!(",
    "anyhow!(",
    "context(",
    "refuse(",
    "refusal(",
    "invalid(",
    "Err(",
    "invalid_response(",
    "say(format_args!(",
];

/// Minimum length of a recognizable part of a message, in bytes.
const ENOUGH: usize = 12;

/// A message with placeholders.
#[derive(Debug)]
pub struct Message {
    /// File and line.
    pub place: String,
    /// The literal.
    pub text: String,
    /// Text between placeholders.
    parts: Vec<String>,
}

impl Message {
    /// Returns whether a printed line is this message.
    pub fn is(&self, line: &str) -> bool {
        let letters: usize = self.parts.iter().map(String::len).sum();
        let mut rest = line;
        letters >= 8
            && self.parts.iter().all(|part| match rest.find(part.as_str()) {
                Some(at) => {
                    rest = &rest[at + part.len()..];
                    true
                }
                None => false,
            })
    }

    /// Returns whether a test's text names this message.
    fn is_in(&self, part: &str) -> bool {
        part.len() >= ENOUGH
            && part.trim().contains(' ')
            && self.parts.iter().any(|own| {
                own.contains(part) || (own.trim().len() >= ENOUGH && part.contains(own.trim()))
            })
    }

    /// Returns whether a test's text, which may have placeholders, names this message.
    pub fn is_named_by(&self, text: &Text) -> bool {
        text.parts.iter().any(|part| self.is_in(part))
    }
}

/// A string literal of a test.
#[derive(Debug)]
pub struct Text {
    parts: Vec<String>,
}

/// Returns all messages of files and folders, without those of their tests.
pub fn messages(code: &[&str]) -> Result<Vec<Message>> {
    let mut messages = Vec::new();
    for path in code {
        for file in files(&top().join(path))? {
            let text = fs::read_to_string(&file)?;
            let (own, _) = split(&file, &text);
            let place = file.strip_prefix(top())?.display().to_string();
            for literal in literals(own) {
                let parts = parts(&literal.text);
                let letters: usize = parts.iter().map(String::len).sum();
                // A part of a message, or a format for messages, is read together with the message.
                let whole = letters > 10 && !literal.text.starts_with([' ', ',']);
                let words = literal.text.split_whitespace().count();
                if whole && words >= 3 && is_message(&literal.before) {
                    let place = format!("{place}:{}", literal.line);
                    messages.push(Message { place, text: literal.text, parts });
                }
            }
        }
    }
    Ok(messages)
}

/// Returns all string literals of tests, and golden files of real commands. Excludes the golden
/// tests, whose daemon is fake.
pub fn read_by_tests() -> Result<Vec<Text>> {
    let mut texts = Vec::new();
    let folders =
        ["tests", "mdev-core", "vfio-user-server", "qemu-integration", "cluster-integration"];
    for path in folders {
        for file in files(&top().join(path))? {
            // The list of exceptions is not a test.
            if file.parent().is_some_and(|folder| folder.ends_with("tests/golden"))
                || file.ends_with("cli/errors.rs")
            {
                continue;
            }
            let text = fs::read_to_string(&file)?;
            let (_, tests) = split(&file, &text);
            texts.extend(literals(tests).into_iter().map(|one| Text { parts: parts(&one.text) }));
        }
    }
    let golden = top().join("qemu-integration/vgpuctl/tests/golden");
    for file in fs::read_dir(golden)? {
        let file = file?.path();
        if file.extension().is_none_or(|extension| extension != "txt") {
            continue;
        }
        let text = fs::read_to_string(file)?;
        let errors = text.lines().filter_map(|line| line.strip_prefix("stderr: "));
        texts.extend(errors.map(|line| Text { parts: vec![line.to_owned()] }));
    }
    Ok(texts)
}

fn top() -> &'static Path {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().unwrap_or(tests)
}

/// Returns source files, sorted by name.
fn files(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = fs::read_dir(path).with_context(|| format!("Cannot read {}", path.display()))?;
    let mut paths: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        if path.is_dir() && !path.ends_with("target") {
            found.extend(files(&path)?);
        } else if is_source {
            found.push(path);
        }
    }
    Ok(found)
}

/// Splits a source into program and tests.
fn split<'a>(file: &Path, text: &'a str) -> (&'a str, &'a str) {
    let file = file.strip_prefix(top()).unwrap_or(file);
    let of_tests = file.components().any(|part| part.as_os_str() == "tests")
        || file.ends_with("tests.rs")
        || file.ends_with("power.rs");
    let modules = ["#[cfg(test)]\nmod tests {", "#[cfg(test)]\npub(crate) mod tests {"];
    match modules.iter().find_map(|begin| text.find(begin)) {
        _ if of_tests => ("", text),
        Some(at) => text.split_at(at),
        None => (text, ""),
    }
}

#[derive(Debug)]
struct Literal {
    text: String,
    line: usize,
    /// Code before the literal in its statement, without literals and comments.
    before: String,
}

/// Returns the string literals of a source.
fn literals(source: &str) -> Vec<Literal> {
    let mut found = Vec::new();
    let (mut code, mut line) = (String::new(), 1);
    let mut rest = source;
    while let Some(next) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
            continue;
        }
        // A character literal with a quote.
        let letter = ["'\"'", "'\\\"'", "'\\''", "b'\"'"].iter().find(|l| rest.starts_with(**l));
        if let Some(letter) = letter {
            rest = &rest[letter.len()..];
            continue;
        }
        let (open, close) = match () {
            () if rest.starts_with("r#\"") => ("r#\"", "\"#"),
            () if next == '"' => ("\"", "\""),
            () => {
                code.push(next);
                line += usize::from(next == '\n');
                rest = &rest[next.len_utf8()..];
                continue;
            }
        };
        rest = &rest[open.len()..];
        let end = if open == "\"" { end_of(rest) } else { rest.find(close).unwrap_or(rest.len()) };
        let raw = &rest[..end];
        let text = if open == "\"" { unescaped(raw) } else { raw.to_owned() };
        let statement = code.rsplit([';']).next().unwrap_or_default();
        let from = statement.len().saturating_sub(400);
        let from = (from..=statement.len()).find(|at| statement.is_char_boundary(*at));
        let before = statement[from.unwrap_or_default()..].to_owned();
        found.push(Literal { text, line, before });
        line += raw.matches('\n').count();
        rest = rest.get(end + close.len()..).unwrap_or_default();
    }
    found
}

/// Returns the end of a string literal.
fn end_of(rest: &str) -> usize {
    let mut escaped = false;
    let end = rest.bytes().position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.unwrap_or(rest.len())
}

fn unescaped(raw: &str) -> String {
    let mut text = String::new();
    let mut letters = raw.chars().peekable();
    while let Some(letter) = letters.next() {
        match (letter, letters.peek()) {
            ('\\', Some('\n')) => while letters.next_if(|c| c.is_whitespace()).is_some() {},
            ('\\', Some('n')) => {
                letters.next();
                text.push('\n');
            }
            ('\\', _) => text.extend(letters.next()),
            _ => text.push(letter),
        }
    }
    text
}

/// Returns whether a literal after this code is a message for users and not for the log.
fn is_message(before: &str) -> bool {
    let last = |mark: &str| before.rfind(mark);
    match (MARKS.iter().filter_map(|mark| last(mark)).max(), last("log::")) {
        (Some(message), Some(log)) => message > log,
        (message, None) => message.is_some(),
        (None, _) => false,
    }
}

/// Returns the text between the placeholders of a literal.
fn parts(text: &str) -> Vec<String> {
    let text = text.replace("{{", "\u{1}").replace("}}", "\u{2}");
    let mut parts = Vec::new();
    let mut rest = text.as_str();
    while let Some((part, after)) = rest.split_once('{') {
        parts.push(part);
        rest = after.split_once('}').map_or("", |(_, rest)| rest);
    }
    parts.push(rest);
    let whole = |part: &str| part.replace('\u{1}', "{").replace('\u{2}', "}");
    parts.into_iter().map(whole).filter(|part| !part.is_empty()).collect()
}

#[test]
fn messages_are_distinguished_from_other_texts() {
    let source = r#"
        // bail!("not a message at all");
        let c = '"'; let usage = "no message at all";
        bail!("Cannot {what} the \"thing\": {error}; \
               try {{it}} again");
        log::warn!("this is the log's: {error}");
        return Err(format!("this is one; yes {a}"));
    "#;
    let found: Vec<_> = literals(source)
        .into_iter()
        .filter(|literal| is_message(&literal.before))
        .map(|literal| literal.text)
        .collect();
    let first = "Cannot {what} the \"thing\": {error}; try {{it}} again";
    assert_eq!(found, [first, "this is one; yes {a}"]);
    let message = Message { place: String::new(), text: first.into(), parts: parts(first) };
    assert!(message.is("x: Cannot move the \"thing\": no; try {it} again"));
    assert!(!message.is("Cannot move the thing: no; try {it} again"));
    assert!(message.is_named_by(&Text { parts: parts("{x}; try {{it}} again") }));
    assert!(!message.is_named_by(&Text { parts: parts("again") }));
}
