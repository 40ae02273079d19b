"""A control worker's deployments alone, to be killed: python -m ... DATABASE_URL ENGINE_URL."""

import sys

from app.db.session import Database
from app.policies.deploy import Deployer

if __name__ == "__main__":
    Deployer(Database(sys.argv[1]), [sys.argv[2]]).tick(wait_s=60)
