//! Parser and editor for XML of other programs. Edits replace ranges of the text; the rest of the
//! text stays unchanged.

use std::ops::Range;

use quick_xml::XmlVersion;
use quick_xml::escape::unescape;
use quick_xml::events::{BytesStart, Event};
use quick_xml::name::ResolveResult;
use quick_xml::reader::NsReader;

/// Maximum length of a parsed text. A domain with a thousand disks stays well below this.
pub const MAX_BYTES: usize = 8 << 20;
/// Maximum nesting depth. libvirt's documents stay below 10.
const MAX_DEPTH: usize = 64;

/// Reason why a text cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XmlError {
    /// The text is not well-formed XML.
    #[error("Not well-formed XML: {0}")]
    Malformed(String),
    /// The text exceeds [`MAX_BYTES`].
    #[error("The XML is longer than {} MiB", MAX_BYTES >> 20)]
    TooLong,
    /// The nesting exceeds the maximum depth.
    #[error("The XML is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
}

/// Element with its position in the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Element {
    /// Namespace; empty if the element has none.
    pub namespace: String,
    /// Local name, without a prefix.
    pub name: String,
    /// Attributes with their qualified names, in document order.
    pub attributes: Vec<(String, String)>,
    /// Child elements.
    pub children: Vec<Element>,
    /// Range of the whole element, including its tags.
    pub span: Range<usize>,
    /// Range of the start tag.
    pub tag: Range<usize>,
    /// Range between the tags; empty for a self-closing tag.
    pub inner: Range<usize>,
}

impl Element {
    /// Parses a text and returns its root element.
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
                None => return Err(malformed(&"more than one root element")),
            }
        }
        match root {
            Some(root) if open.is_empty() => Ok(root),
            _ => Err(malformed(&"unexpected end of the text")),
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

    /// Returns the value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        let found = self.attributes.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    /// Returns the first child with this name and no namespace.
    pub fn child(&self, name: &str) -> Option<&Self> {
        self.child_in("", name)
    }

    /// Returns the first child with this name in a namespace.
    pub fn child_in(&self, namespace: &str, name: &str) -> Option<&Self> {
        self.children_in(namespace, name).next()
    }

    /// Returns all children with this name in a namespace.
    pub fn children_in(&self, namespace: &str, name: &str) -> impl Iterator<Item = &Self> {
        let matches = move |child: &&Self| child.name == name && child.namespace == namespace;
        self.children.iter().filter(matches)
    }

    /// Returns the element and all its descendants.
    pub fn subtree(&self) -> Vec<&Self> {
        let mut found = vec![self];
        let mut at = 0;
        while let Some(element) = found.get(at).copied() {
            found.extend(&element.children);
            at += 1;
        }
        found
    }

    /// Returns the unescaped text of an element without children.
    pub fn text(&self, whole: &str) -> String {
        let raw = whole.get(self.inner.clone()).unwrap_or_default().trim();
        unescape(raw).map_or_else(|_| raw.to_owned(), std::borrow::Cow::into_owned)
    }
}

/// Edits of a text, applied together. Edits must not overlap.
#[derive(Debug)]
pub struct Edits<'a> {
    text: &'a str,
    edits: Vec<(Range<usize>, String)>,
}

impl<'a> Edits<'a> {
    /// Creates an empty list of edits.
    pub fn new(text: &'a str) -> Self {
        Self { text, edits: Vec::new() }
    }

    /// Replaces a range of the text.
    pub fn replace(&mut self, range: Range<usize>, by: impl Into<String>) {
        self.edits.push((range, by.into()));
    }

    /// Inserts an element's lines after a sibling, with the indentation of the sibling.
    pub fn add_after(&mut self, sibling: &Element, lines: &[String]) {
        let indent = self.indent(sibling.span.start);
        let added = indented(lines, indent);
        self.replace(sibling.span.end..sibling.span.end, added);
    }

    /// Appends an element's lines to the children of a parent element.
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

    /// Removes an element and the white space before it.
    pub fn remove(&mut self, element: &Element) {
        let before = self.text.get(..element.span.start).unwrap_or_default();
        self.replace(before.trim_end().len()..element.span.end, "");
    }

    /// Returns the indentation of the line at an offset.
    fn indent(&self, at: usize) -> &'a str {
        let before = self.text.get(..at).unwrap_or_default();
        let line = before.rsplit('\n').next().unwrap_or_default();
        if line.trim().is_empty() { line } else { "" }
    }

    /// Returns the text with all edits applied.
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

/// Joins lines, each preceded by a line break and the indentation.
fn indented(lines: &[String], indent: &str) -> String {
    lines.iter().flat_map(|line| ["\n", indent, line]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn elements_have_their_ranges_in_the_text() {
        let text = "<?xml version='1.0'?>\n<a x='1&amp;2' xmlns:n='urn:n'><!-- <c/> --><n:b/><c> d&lt; </c></a>\n";
        let a = Element::parse(text).unwrap();
        assert_eq!(a.attribute("x"), Some("1&2"));
        let b = a.child_in("urn:n", "b").unwrap();
        assert_eq!(&text[b.span.clone()], "<n:b/>");
        assert!(a.child("b").is_none());
        let c = a.child("c").unwrap();
        assert_eq!((&text[c.span.clone()], c.text(text).as_str()), ("<c> d&lt; </c>", "d<"));
        assert_eq!(a.subtree().len(), 3);
    }

    #[test]
    fn malformed_documents_are_refused() {
        for text in ["", "<a>", "<a></b>", "<a/><b/>", "text", "<a x=1/>", "<a x='1' x='2'/>"] {
            assert!(matches!(Element::parse(text), Err(XmlError::Malformed(_))), "{text}");
        }
        let said = |text: &str| Element::parse(text).unwrap_err().to_string();
        assert_eq!(said("<a/><b/>"), "Not well-formed XML: more than one root element");
        assert_eq!(said("<a>"), "Not well-formed XML: unexpected end of the text");
        assert_eq!(said(&"<a>".repeat(100)), "The XML is nested deeper than 64 levels");
        assert_eq!(said(&" ".repeat(MAX_BYTES + 1)), "The XML is longer than 8 MiB");
    }

    #[test]
    fn added_lines_are_indented_like_siblings() {
        let text = "<a>\n  <b/>\n  <c>\n  </c>\n</a>\n";
        let a = Element::parse(text).unwrap();
        let mut edits = Edits::new(text);
        edits.add_after(a.child("b").unwrap(), &["<x>".to_owned(), "</x>".to_owned()]);
        edits.add_last(a.child("c").unwrap(), &["<y/>".to_owned()]);
        edits.add_last(&a, &["<z/>".to_owned()]);
        let changed = edits.apply();
        assert_eq!(changed, "<a>\n  <b/>\n  <x>\n  </x>\n  <c>\n    <y/>\n  </c>\n  <z/>\n</a>\n");
        let a = Element::parse(&changed).unwrap();
        let mut edits = Edits::new(&changed);
        edits.remove(a.child("x").unwrap());
        edits.remove(a.child("z").unwrap());
        edits.remove(&a.child("c").unwrap().children[0]);
        assert_eq!(edits.apply(), text);
    }

    #[test]
    fn children_can_be_added_to_a_self_closing_element() {
        let text = "<a>\n  <b x='1' />\n</a>";
        let a = Element::parse(text).unwrap();
        let mut edits = Edits::new(text);
        edits.add_last(a.child("b").unwrap(), &["<y/>".to_owned()]);
        assert_eq!(edits.apply(), "<a>\n  <b x='1'>\n    <y/>\n  </b>\n</a>");
    }

    proptest! {
        #[test]
        fn parsing_does_not_panic(text in "[<>/a-c='\" \n&;:!?-]{0,60}") {
            if let Ok(element) = Element::parse(&text) {
                prop_assert!(element.subtree().iter().all(|e| text.get(e.span.clone()).is_some()));
            }
        }
    }
}
