//! Actions, events, states and versions of mdevctl's callout protocol.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Action on a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Start of the vGPU.
    Start,
    /// Stop of the vGPU.
    Stop,
    /// Write of its definition.
    Define,
    /// Removal of its definition.
    Undefine,
    /// Change of its definition or of the running vGPU.
    Modify,
    /// Query of attributes. `vgpud` knows the attributes and does not send this action.
    Attributes,
    /// Query of the events and actions that a script supports.
    Capabilities,
    /// Value of a later version of the protocol.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// Reason for running a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Event {
    /// Before the action. The script can refuse the action.
    Pre,
    /// After the action.
    Post,
    /// After the action, for notifiers.
    Notify,
    /// Query.
    Get,
    /// Before a change of a running vGPU.
    Live,
    /// Value of a later version of the protocol.
    #[serde(other, skip_serializing)]
    Unknown,
}

/// State of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The action has not been executed.
    None,
    /// The action succeeded.
    Success,
    /// The action failed.
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

/// Events and actions that a script or the daemon supports.
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
    /// Returns the events and actions of a script without version support.
    pub fn version_1() -> Self {
        use Action::{Attributes, Define, Modify, Start, Stop, Undefine};
        Self {
            version: 1,
            actions: vec![Start, Stop, Define, Undefine, Modify, Attributes],
            events: vec![Event::Pre, Event::Post, Event::Notify, Event::Get],
        }
    }

    /// Parses the answer of a script with version support. Returns `None` for any other output.
    pub fn parse(stdout: &str) -> Option<Self> {
        let answer: Answer = serde_json::from_str(stdout.trim_end_matches('\0')).ok()?;
        Some(answer.supports)
    }

    /// Returns whether an event of an action is supported.
    pub fn has(&self, event: Event, action: Action) -> bool {
        self.events.contains(&event) && self.actions.contains(&action)
    }
}

/// Returns the daemon's supported events and actions, as JSON for a script's standard input.
pub fn provides() -> String {
    let mut provides = Supports::version_1();
    provides.version = 2;
    provides.actions.push(Action::Capabilities);
    provides.events.push(Event::Live);
    // Serialization of strings and numbers cannot fail.
    serde_json::to_string(&Provides { provides }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn provided_events_are_those_of_mdevctl() {
        assert_eq!(
            provides(),
            "{\"provides\":{\"version\":2,\
             \"actions\":[\"start\",\"stop\",\"define\",\"undefine\",\"modify\",\"attributes\",\"capabilities\"],\
             \"events\":[\"pre\",\"post\",\"notify\",\"get\",\"live\"]}}"
        );
    }

    #[test]
    fn unknown_values_of_later_versions_are_accepted() {
        let text =
            r#"{"supports":{"version":3,"actions":["modify","paint"],"events":["live","x"]}}"#;
        let supports = Supports::parse(&format!("{text}\0")).unwrap();
        assert!(supports.has(Event::Live, Action::Modify));
        assert!(!supports.has(Event::Pre, Action::Modify));
        assert!(!supports.has(Event::Live, Action::Start));
        for text in ["", "ok", "{}", "[]", "{\"supports\":null}", "{\"supports\":{\"version\":2}}"]
        {
            assert_eq!(Supports::parse(text), None, "{text}");
        }
    }
}
