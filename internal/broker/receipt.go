package broker

import (
	"encoding/json"
	"strconv"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
	"github.com/stockade-run/stockade/internal/wire"
)

// statement is what a receipt signs: JSON with exactly these fields in this
// order and no space, so that the payload alone is what has to be kept.
type statement struct {
	Type       string    `json:"type"` // "stockade-receipt-1"
	ID         string    `json:"id"`
	Handle     string    `json:"handle"`
	RequestID  string    `json:"request_id"`
	Workspace  string    `json:"workspace"`
	Run        string    `json:"run"`
	Target     string    `json:"target"`
	Box        string    `json:"box"`
	Generation int64     `json:"generation"`
	Host       string    `json:"host"`
	BootID     string    `json:"boot_id"`
	Method     string    `json:"method"`
	Container  string    `json:"container"`
	Cgroup     string    `json:"cgroup"`
	EmptyAt    time.Time `json:"empty_at"`
	Exit       *api.Exit `json:"exit"`
}

const statementType = "stockade-receipt-1"

// sign makes the receipt of a process whose tree is proven gone.
func (b *Broker) sign(p store.Process, proof wire.Proof) *api.Receipt {
	s := statement{
		Type: statementType, ID: secret.ID(ident.Receipt), Handle: p.Handle, RequestID: p.RequestID,
		Workspace: p.Workspace, Run: p.Run, Target: p.Target, Box: p.Box, Generation: p.Generation,
		Host: p.HostID, BootID: proof.BootID, Method: proof.Method, Container: proof.Container, Cgroup: proof.Cgroup,
		EmptyAt: proof.EmptyAt.UTC().Truncate(time.Microsecond), Exit: p.Exit,
	}
	payload, err := json.Marshal(s)
	if err != nil {
		panic("broker: a receipt cannot be encoded: " + err.Error()) // strings, integers and a checked time
	}
	return &api.Receipt{
		ID: s.ID, Handle: s.Handle, Generation: s.Generation, Host: s.Host, BootID: s.BootID, Method: s.Method,
		EmptyAt: s.EmptyAt, Exit: s.Exit,
		Payload: payload, PublicKey: b.cfg.Signer.Public(), Signature: b.cfg.Signer.Sign(payload),
	}
}

func decimal(n int64) string { return strconv.FormatInt(n, 10) }
