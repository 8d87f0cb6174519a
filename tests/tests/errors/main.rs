//! Every error message of the CLI, the API and the daemon is read by a test.
//!
//! [`sources`] finds the messages in the sources; [`provoke`] makes the real programs say what it can, by mistakes, and
//! [`faults`] by a world that is in the way. What nobody says
//! and no other test names fails here, with its place: add a case to `provoke`, or a test that reads it. [`BEYOND`] is for
//! what a test cannot bring about, with the reason.

mod faults;
mod provoke;
mod sources;

use anyhow::Result;

/// Where messages are.
const CODE: [&str; 13] = [
    "qemu-integration/vgpuctl/src",
    "qemu-integration/integrate/src",
    "vfio-user-server/src/console",
    "vfio-user-server/src/api",
    "vfio-user-server/src/manager",
    "vfio-user-server/src/callouts",
    "vfio-user-server/src/main.rs",
    "vfio-user-server/src/usage.rs",
    "vfio-user-server/src/users.rs",
    "vfio-user-server/src/who.rs",
    "vfio-user-server/src/backend.rs",
    "mdev-core/src/definition",
    "mdev-core/src/definition.rs",
];

/// Messages that no test reads, by how they begin, and why.
const BEYOND: &[(&str, &str)] = &[];

#[test]
fn every_message_is_read_by_a_test() -> Result<()> {
    let messages = sources::messages(&CODE)?;
    assert!(messages.len() > 100, "too few to be all: {}", messages.len());
    for (begin, _) in BEYOND {
        let there = messages.iter().any(|message| message.text.starts_with(begin));
        assert!(there, "{begin:?} is no message any more: take it out of the list");
    }
    let said = provoke::all()?;
    let read = sources::read_by_tests()?;
    let mut unread = Vec::new();
    for message in &messages {
        let beyond = BEYOND.iter().any(|(begin, _)| message.text.starts_with(begin));
        let seen = said.iter().any(|line| message.is(line));
        let named = read.iter().any(|text| message.is_named_by(text));
        if !beyond && !seen && !named {
            unread.push(format!("{}: {:?}", message.place, message.text));
        }
    }
    assert!(
        unread.is_empty(),
        "{} of {} messages are read by no test; provoke them in tests/tests/errors/provoke.rs, or read them \
         elsewhere:\n{}\n\nwhat was said:\n{}",
        unread.len(),
        messages.len(),
        unread.join("\n"),
        said.join("\n")
    );
    Ok(())
}

#[test]
fn every_message_is_one_line() -> Result<()> {
    for line in provoke::all()? {
        assert!(line.trim_end().lines().count() == 1, "{line}");
    }
    Ok(())
}

#[test]
fn no_message_repeats_its_cause() -> Result<()> {
    for line in provoke::all()? {
        let parts: Vec<_> = line.trim().split(": ").collect();
        let twice = parts.windows(2).find(|pair| pair[0] == pair[1]);
        assert!(twice.is_none(), "{line}");
        let errors = line.matches("(os error ").count();
        assert!(errors < 2, "two causes, or one twice: {line}");
    }
    Ok(())
}
