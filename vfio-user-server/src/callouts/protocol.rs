//! What scripts are told and what they answer, in mdevctl's words.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What is done to a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It is started.
    Start,
    /// It is stopped.
    Stop,
    /// A definition of it is written.
    Define,
    /// Its definition is removed.
    Undefine,
    /// Its definition, or what runs, is changed.
    Modify,
    /// Attributes are asked for. Not here: `vgpud` knows them itself.
    Attributes,
    /// It is asked which events and actions a script is for.
    Capabilities,
    /// Something of a later version.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// When a script is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// Before the action, which it may refuse.
    Pre,
    /// After the action.
    Post,
    /// At the end, for those who only want to know.
    Notify,
    /// A question.
    Get,
    /// Before a running vGPU is changed.
    Live,
    /// Something of a later version.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// How an action went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not been done.
    None,
    /// Well.
    Success,
    /// Not so.
    Failure,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Define => "define",
            Self::Undefine => "undefine",
            Self::Modify => "modify",
            Self::Attributes => "attributes",
            Self::Capabilities => "capabilities",
            Self::Unknown => "unknown",
        })
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pre => "pre",
            Self::Post => "post",
            Self::Notify => "notify",
            Self::Get => "get",
            Self::Live => "live",
            Self::Unknown => "unknown",
        })
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Success => "success",
            Self::Failure => "failure",
        })
    }
}

/// Which events and actions one side knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Supports {
    version: u32,
    actions: Vec<Action>,
    events: Vec<Event>,
}

#[derive(Serialize)]
struct Provides {
    provides: Supports,
}

#[derive(Deserialize)]
struct Answer {
    supports: Supports,
}

impl Supports {
    /// What a script without a version is for.
    pub fn first_version() -> Self {
        use Action::{Attributes, Define, Modify, Start, Stop, Undefine};
        Self {
            version: 1,
            actions: vec![Start, Stop, Define, Undefine, Modify, Attributes],
            events: vec![Event::Pre, Event::Post, Event::Notify, Event::Get],
        }
    }

    /// What a script with a version answered; `None` where that is no such answer.
    pub fn read(stdout: &str) -> Option<Self> {
        let answer: Answer = serde_json::from_str(stdout.trim_end_matches('\0')).ok()?;
        Some(answer.supports)
    }

    /// True where an event of an action is among it.
    pub fn has(&self, event: Event, action: Action) -> bool {
        self.events.contains(&event) && self.actions.contains(&action)
    }
}

/// What scripts are told of us when they are asked for their version.
pub fn provides() -> String {
    let mut provides = Supports::first_version();
    provides.version = 2;
    provides.actions.push(Action::Capabilities);
    provides.events.push(Event::Live);
    // Words and a number: nothing in it can fail to be written.
    serde_json::to_string(&Provides { provides }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_told_what_mdevctl_tells_them() {
        assert_eq!(
            provides(),
            "{\"provides\":{\"version\":2,\
             \"actions\":[\"start\",\"stop\",\"define\",\"undefine\",\"modify\",\"attributes\",\"capabilities\"],\
             \"events\":[\"pre\",\"post\",\"notify\",\"get\",\"live\"]}}"
        );
    }

    #[test]
    fn answers_are_read_and_words_of_later_versions_are_no_mistake() {
        let text =
            r#"{"supports":{"version":3,"actions":["modify","paint"],"events":["live","x"]}}"#;
        let supports = Supports::read(&format!("{text}\0")).unwrap();
        assert!(supports.has(Event::Live, Action::Modify));
        assert!(!supports.has(Event::Pre, Action::Modify));
        assert!(!supports.has(Event::Live, Action::Start));
        for text in ["", "ok", "{}", "[]", "{\"supports\":null}", "{\"supports\":{\"version\":2}}"]
        {
            assert_eq!(Supports::read(text), None, "{text}");
        }
    }
}
