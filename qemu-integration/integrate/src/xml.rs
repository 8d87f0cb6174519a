//! XML that belongs to somebody else: read as a tree, changed by a few cuts in its text, and otherwise left as it is.

use std::ops::Range;

use quick_xml::XmlVersion;
use quick_xml::escape::unescape;
use quick_xml::events::{BytesStart, Event};
use quick_xml::name::ResolveResult;
use quick_xml::reader::NsReader;

/// Longest text that is read: a domain with a thousand disks is well below.
pub const MAX_BYTES: usize = 8 << 20;
/// Deepest nesting: libvirt's own is below 10.
const MAX_DEPTH: usize = 64;

/// Why a text cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XmlError {
    /// Not XML.
    #[error("This is no XML: {0}")]
    Malformed(String),
    /// Longer than anything that makes sense.
    #[error("This XML is longer than {} MiB", MAX_BYTES >> 20)]
    TooLong,
    /// Deeper than anything that makes sense.
    #[error("This XML is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
}

/// An element, and where in the text it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// Its namespace; empty where it has none.
    pub namespace: String,
    /// Its name, without a prefix.
    pub name: String,
    /// Its attributes, by their names as they are written.
    pub attributes: Vec<(String, String)>,
    /// The elements in it.
    pub children: Vec<Element>,
    /// All of it.
    pub span: Range<usize>,
    /// Its start tag.
    pub tag: Range<usize>,
    /// What is between its tags; empty where it has one tag only.
    pub inner: Range<usize>,
}

impl Element {
    /// The element that a text consists of.
    pub fn parse(text: &str) -> Result<Self, XmlError> {
        if text.len() > MAX_BYTES {
            return Err(XmlError::TooLong);
        }
        let malformed = |error: &dyn std::fmt::Display| XmlError::Malformed(error.to_string());
        let mut reader = NsReader::from_str(text);
        reader.config_mut().enable_all_checks(true);
        let mut open: Vec<Self> = Vec::new();
        let mut root = None;
        loop {
            let start = reader.buffer_position() as usize;
            let (resolved, event) =
                reader.read_resolved_event().map_err(|error| malformed(&error))?;
            let namespace = match resolved {
                ResolveResult::Bound(namespace) => namespace.0.to_owned(),
                _ => String::new(),
            };
            let end = reader.buffer_position() as usize;
            let whole = match event {
                Event::Start(tag) => {
                    if open.len() == MAX_DEPTH {
                        return Err(XmlError::TooDeep);
                    }
                    open.push(Self::of_tag(&tag, namespace, start..end)?);
                    continue;
                }
                Event::Empty(tag) => Self::of_tag(&tag, namespace, start..end)?,
                Event::End(_) => {
                    let Some(mut element) = open.pop() else { continue };
                    element.inner.end = start;
                    element.span.end = end;
                    element
                }
                Event::Eof => break,
                _ => continue,
            };
            match open.last_mut() {
                Some(parent) => parent.children.push(whole),
                None if root.is_none() => root = Some(whole),
                None => return Err(malformed(&"it has two elements at its top")),
            }
        }
        match root {
            Some(root) if open.is_empty() => Ok(root),
            _ => Err(malformed(&"it ends too early")),
        }
    }

    fn of_tag(tag: &BytesStart<'_>, namespace: String, at: Range<usize>) -> Result<Self, XmlError> {
        let malformed = |error: &dyn std::fmt::Display| XmlError::Malformed(error.to_string());
        let mut attributes = Vec::new();
        for attribute in tag.attributes() {
            let attribute = attribute.map_err(|error| malformed(&error))?;
            let value = attribute.normalized_value(XmlVersion::Implicit1_0);
            let value = value.map_err(|error| malformed(&error))?.into_owned();
            attributes.push((attribute.key.as_ref().to_owned(), value));
        }
        Ok(Self {
            namespace,
            name: tag.local_name().as_ref().to_owned(),
            attributes,
            children: Vec::new(),
            span: at.clone(),
            inner: at.end..at.end,
            tag: at,
        })
    }

    /// An attribute's value.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// The first child with this name and no namespace.
    pub fn child(&self, name: &str) -> Option<&Self> {
        self.child_in("", name)
    }

    /// The first child with this name in a namespace.
    pub fn child_in(&self, namespace: &str, name: &str) -> Option<&Self> {
        self.children_in(namespace, name).next()
    }

    /// All children with this name in a namespace.
    pub fn children_in(&self, namespace: &str, name: &str) -> impl Iterator<Item = &Self> {
        let is = move |child: &&Self| child.name == name && child.namespace == namespace;
        self.children.iter().filter(is)
    }

    /// Itself and all below it.
    pub fn all(&self) -> Vec<&Self> {
        let mut found = vec![self];
        let mut at = 0;
        while let Some(element) = found.get(at).copied() {
            found.extend(&element.children);
            at += 1;
        }
        found
    }

    /// The text in it, where it holds nothing else.
    pub fn text(&self, whole: &str) -> String {
        let raw = whole.get(self.inner.clone()).unwrap_or_default().trim();
        unescape(raw).map_or_else(|_| raw.to_owned(), std::borrow::Cow::into_owned)
    }
}

/// Changes to a text, made all at once. They must not overlap.
#[derive(Debug)]
pub struct Edits<'a> {
    text: &'a str,
    edits: Vec<(Range<usize>, String)>,
}

impl<'a> Edits<'a> {
    /// None yet.
    pub fn of(text: &'a str) -> Self {
        Self { text, edits: Vec::new() }
    }

    /// Puts another text in a place.
    pub fn replace(&mut self, range: Range<usize>, by: impl Into<String>) {
        self.edits.push((range, by.into()));
    }

    /// Adds an element behind a sibling, on lines of its own that are indented as the sibling is.
    pub fn add_after(&mut self, sibling: &Element, lines: &[String]) {
        let indent = self.indent(sibling.span.start);
        let added = indented(lines, indent);
        self.replace(sibling.span.end..sibling.span.end, added);
    }

    /// Adds an element as the last in another one.
    pub fn add_last(&mut self, parent: &Element, lines: &[String]) {
        if let Some(last) = parent.children.last() {
            return self.add_after(last, lines);
        }
        let indent = self.indent(parent.span.start);
        let added = indented(lines, &format!("{indent}  "));
        if parent.tag == parent.span {
            // <name/> becomes <name>...</name>.
            let tag = self.text.get(parent.tag.clone()).unwrap_or_default();
            let open = tag.trim_end_matches('>').trim_end_matches('/').trim_end();
            let name = open.trim_start_matches('<').split_whitespace().next().unwrap_or_default();
            let whole = format!("{open}>{added}\n{indent}</{name}>");
            return self.replace(parent.span.clone(), whole);
        }
        self.replace(parent.tag.end..parent.tag.end, added);
    }

    /// Removes an element, and the white space before it.
    pub fn remove(&mut self, element: &Element) {
        let before = self.text.get(..element.span.start).unwrap_or_default();
        self.replace(before.trim_end().len()..element.span.end, "");
    }

    /// The white space that a place's line begins with.
    fn indent(&self, at: usize) -> &'a str {
        let before = self.text.get(..at).unwrap_or_default();
        let line = before.rsplit('\n').next().unwrap_or_default();
        if line.trim().is_empty() { line } else { "" }
    }

    /// The text with all changes.
    pub fn apply(mut self) -> String {
        self.edits.sort_by_key(|(range, _)| range.start);
        let mut result = String::with_capacity(self.text.len() + 1024);
        let mut at = 0;
        for (range, by) in &self.edits {
            result.push_str(self.text.get(at..range.start).unwrap_or_default());
            result.push_str(by);
            at = range.end;
        }
        result.push_str(self.text.get(at..).unwrap_or_default());
        result
    }
}

/// Lines, each behind an end of line and an indentation.
fn indented(lines: &[String], indent: &str) -> String {
    lines.iter().flat_map(|line| ["\n", indent, line]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn elements_know_where_they_are() {
        let text = "<?xml version='1.0'?>\n<a x='1&amp;2' xmlns:n='urn:n'><!-- <c/> --><n:b/><c> d&lt; </c></a>\n";
        let a = Element::parse(text).unwrap();
        assert_eq!(a.attribute("x"), Some("1&2"));
        let b = a.child_in("urn:n", "b").unwrap();
        assert_eq!(&text[b.span.clone()], "<n:b/>");
        assert!(a.child("b").is_none());
        let c = a.child("c").unwrap();
        assert_eq!((&text[c.span.clone()], c.text(text).as_str()), ("<c> d&lt; </c>", "d<"));
        assert_eq!(a.all().len(), 3);
    }

    #[test]
    fn what_is_no_document_is_refused() {
        for text in ["", "<a>", "<a></b>", "<a/><b/>", "text", "<a x=1/>", "<a x='1' x='2'/>"] {
            assert!(matches!(Element::parse(text), Err(XmlError::Malformed(_))), "{text}");
        }
        let said = |text: &str| Element::parse(text).unwrap_err().to_string();
        assert_eq!(said("<a/><b/>"), "This is no XML: it has two elements at its top");
        assert_eq!(said("<a>"), "This is no XML: it ends too early");
        assert_eq!(said(&"<a>".repeat(100)), "This XML is nested deeper than 64 levels");
        assert_eq!(said(&" ".repeat(MAX_BYTES + 1)), "This XML is longer than 8 MiB");
    }

    #[test]
    fn added_lines_are_indented_like_their_neighbours() {
        let text = "<a>\n  <b/>\n  <c>\n  </c>\n</a>\n";
        let a = Element::parse(text).unwrap();
        let mut edits = Edits::of(text);
        edits.add_after(a.child("b").unwrap(), &["<x>".to_owned(), "</x>".to_owned()]);
        edits.add_last(a.child("c").unwrap(), &["<y/>".to_owned()]);
        edits.add_last(&a, &["<z/>".to_owned()]);
        let changed = edits.apply();
        assert_eq!(changed, "<a>\n  <b/>\n  <x>\n  </x>\n  <c>\n    <y/>\n  </c>\n  <z/>\n</a>\n");
        let a = Element::parse(&changed).unwrap();
        let mut edits = Edits::of(&changed);
        edits.remove(a.child("x").unwrap());
        edits.remove(a.child("z").unwrap());
        edits.remove(&a.child("c").unwrap().children[0]);
        assert_eq!(edits.apply(), text);
    }

    #[test]
    fn an_element_of_one_tag_can_be_added_to() {
        let text = "<a>\n  <b x='1' />\n</a>";
        let a = Element::parse(text).unwrap();
        let mut edits = Edits::of(text);
        edits.add_last(a.child("b").unwrap(), &["<y/>".to_owned()]);
        assert_eq!(edits.apply(), "<a>\n  <b x='1'>\n    <y/>\n  </b>\n</a>");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[<>/a-c='\" \n&;:!?-]{0,60}") {
            if let Ok(element) = Element::parse(&text) {
                prop_assert!(element.all().iter().all(|e| text.get(e.span.clone()).is_some()));
            }
        }
    }
}
