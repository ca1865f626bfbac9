// SPDX-License-Identifier: Apache-2.0
//! Confines the effect of a broken or hostile file on the `parquet` crate to an error for that file:
//! panics, and reservations of memory that the file does not back.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result as ParquetResult};

use super::codec::Codec;

thread_local! {
    /// Whether this thread is inside [`contained`].
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

static HOOK: Once = Once::new();

/// Runs `call`, a use of the `parquet` crate, and returns its failure as a sentence.
///
/// The crate checks most of what it reads, and asserts, indexes or multiplies in the rest; a crafted file
/// makes that panic. The panic ends here: its message becomes an error, and the panic hook (which would
/// print it) is silent for this thread meanwhile. The data of `call` may be half changed afterwards: the
/// caller discards it on any error.
pub(super) fn contained<T>(call: impl FnOnce() -> ParquetResult<T>) -> Result<T, String> {
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                others(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(call));
    QUIET.set(before);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(panic) => Err(format!(
            "the Parquet data is inconsistent ({})",
            message(&*panic)
        )),
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no more is known")
}

/// Pages of a column chunk, decompressed and passed on only if their sizes match the file.
///
/// The decoders reserve memory for as many values as a page's header claims. A dictionary holds its values
/// back to back, at least `value_bytes` each; a data page holds no more values than its row group has rows.
/// The values bound what is decompressed.
pub(super) struct CheckedPages {
    /// The pages as they are in the file.
    pub inner: Box<dyn PageReader>,
    pub codec: Codec,
    /// Rows of the row group.
    pub rows: u64,
    /// Bytes of a value of the column.
    pub value_bytes: u64,
}

impl CheckedPages {
    fn checked(&self, page: Page) -> ParquetResult<Page> {
        let values = u64::from(page.num_values());
        if page.is_data_page() && values > self.rows {
            return Err(claims(values, self.rows));
        }
        let page = self.codec.decompressed(page, self.value_bytes)?;
        let most = page.buffer().len() as u64 / self.value_bytes;
        if page.is_dictionary_page() && values > most {
            return Err(claims(values, most));
        }
        Ok(page)
    }
}

fn claims(values: u64, most: u64) -> ParquetError {
    ParquetError::General(format!(
        "a page claims {values} values where at most {most} can be"
    ))
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.inner.get_next_page()?;
        page.map(|page| self.checked(page)).transpose()
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.inner.skip_next_page()
    }
}

impl Iterator for CheckedPages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One page, again and again.
    struct OnePage(Page);

    impl PageReader for OnePage {
        fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
            Ok(Some(self.0.clone()))
        }
        fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
            Ok(None)
        }
        fn skip_next_page(&mut self) -> ParquetResult<()> {
            Ok(())
        }
    }

    impl Iterator for OnePage {
        type Item = ParquetResult<Page>;
        fn next(&mut self) -> Option<Self::Item> {
            self.get_next_page().transpose()
        }
    }

    #[test]
    fn dictionary_that_claims_more_values_than_it_has_bytes_for_is_stopped() {
        let dictionary = |num_values| CheckedPages {
            inner: Box::new(OnePage(Page::DictionaryPage {
                buf: vec![0; 64].into(),
                num_values,
                encoding: parquet::basic::Encoding::PLAIN,
                is_sorted: false,
            })),
            codec: Codec::None,
            rows: 1000,
            value_bytes: 8,
        };
        assert!(dictionary(8).get_next_page().is_ok());
        assert!(dictionary(9).get_next_page().is_err());
        assert!(dictionary(u32::MAX).get_next_page().is_err());
    }

    #[test]
    fn panic_inside_is_an_error_with_its_message() {
        let outcome: Result<(), String> = contained(|| panic!("no room at {}", 7));
        assert_eq!(
            outcome,
            Err("the Parquet data is inconsistent (no room at 7)".to_owned())
        );
        assert!(!QUIET.get());
    }
}
