package artifact

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/shelf"
)

// Use says what installations use. The runtime, which holds them in memory (the
// control plane tells them again after every start), saves it after every change,
// so that a collection while no runtime runs knows what the last one used.
type Use struct {
	Artifacts []string  `json:"artifacts"` // digests
	Trees     []string  `json:"trees"`     // digests of dependency trees
	At        time.Time `json:"at"`
}

const useName = "in-use.json"

// SaveUse replaces the record in dir, the directory plugin-runtime. It survives a
// power cut.
func SaveUse(dir string, u Use) error {
	u.Artifacts, u.Trees = slices.Sorted(slices.Values(u.Artifacts)), slices.Sorted(slices.Values(u.Trees))
	b, err := json.Marshal(u)
	if err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "the record of use cannot be encoded")
	}
	if err := durable.Write(dir, useName, b); err != nil {
		return shelf.Refusal(err, "the record of use cannot be written")
	}
	return nil
}

// LoadUse reads the record; ok is false where no runtime of ours has left one.
func LoadUse(dir string) (u Use, ok bool, err error) {
	b, err := os.ReadFile(filepath.Join(dir, useName))
	if errors.Is(err, fs.ErrNotExist) {
		return u, false, nil
	}
	if err != nil {
		return u, false, shelf.Refusal(err, "the record of use cannot be read")
	}
	if err := json.Unmarshal(b, &u); err != nil {
		return u, false, errdefs.Wrap(err, errdefs.Internal, "the record of use %s is damaged", filepath.Join(dir, useName)).
			WithNext("start the runtime, which writes it anew, or remove it")
	}
	return u, true, nil
}
