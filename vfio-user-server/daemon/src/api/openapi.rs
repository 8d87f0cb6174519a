//! The OpenAPI document of the control API.

use utoipa::OpenApi;

use super::routes::Document;

/// Returns the document as docs/openapi.json contains it.
pub fn openapi() -> String {
    // Serialization of strings, lists and maps with string keys cannot fail.
    let mut text = Document::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `UPDATE_GOLDEN=1 cargo test -p vgpud openapi` writes the file.
    #[test]
    fn openapi_file_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(path, openapi()).unwrap();
        }
        let file = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            file == openapi(),
            "docs/openapi.json is not current: UPDATE_GOLDEN=1 cargo test -p vgpud openapi"
        );
    }
}
