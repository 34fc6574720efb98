package boxhost

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/stockade-run/stockade/internal/durable"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/wire"
)

// User ids of boxes begin above what people and services have and end where
// systemd's range for containers does (0x6fffffff, see its "Users, Groups, UIDs
// and GIDs on systemd Systems"), below the signed 32-bit border that some
// programs stumble over.
const (
	firstUID = 0x10000000
	maxSlots = (0x70000000 - firstUID) / oci.IDRange
)

// record is box.json.
type record struct {
	Spec     wire.BoxSpec `json:"spec"`
	Slot     int          `json:"slot"`               // of user ids
	Removing bool         `json:"removing,omitempty"` // removal has begun and must be finished
}

// uidBase is the user id outside that is 0 inside.
func (r record) uidBase() uint32 { return firstUID + uint32(r.Slot)*oci.IDRange }

// agent is the user and group id outside that is the tenant's inside.
func (r record) agent() int { return int(r.uidBase()) + oci.AgentID }

const recordFile = "box.json"

func readRecord(dir string) (record, error) {
	var r record
	b, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil || r.Slot < 0 || r.Slot >= maxSlots {
		return r, errdefs.Wrap(err, errdefs.Internal, "the record %s is damaged", filepath.Join(dir, recordFile)).
			WithNext("its box cannot be used; move %s away to go on without it", dir)
	}
	return r, nil
}

// record writes box.json so that it survives a power cut.
func (m *Manager) record(b *box) error {
	dir := m.boxDir(b.id)
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("make a box's directory: %w", err)
	}
	if err := os.Chmod(dir, 0o711); err != nil { // the umask
		return fmt.Errorf("make a box's directory: %w", err)
	}
	js, err := json.Marshal(b.rec)
	if err != nil {
		return err
	}
	if err := durable.Write(dir, recordFile, js); err != nil {
		return fmt.Errorf("record a box: %w", err)
	}
	if err := durable.SyncDir(m.boxesDir()); err != nil {
		return fmt.Errorf("record a box: %w", err)
	}
	return nil
}
